"""Whether the leaves of a template can take the saved ones."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from . import leaves


def mismatch(path: str, about: dict[str, Any], leaf: Any, cast: bool) -> str:
    """Returns why a leaf of the template cannot take the saved one; "": it can."""
    has_shape = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)
    if has_shape and not leaves.is_key(leaf) and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and is_narrowed(leaf.dtype):
        return f"{leaves.shown(path)} would lose bits: JAX makes no array of {leaf.dtype} without jax_enable_x64"
    if about["kind"] == "plain":
        kind, text = about["value"]
        if not has_shape or (tuple(leaf.shape) == () and kind in leaves.NUMBERS and _holds(leaf.dtype, kind, text, cast)):
            return ""
        other = f", and the template {leaf.dtype} of the shape {tuple(leaf.shape)}" if kind in leaves.NUMBERS else ""
        return f"{leaves.shown(path)} is a Python {kind}{other}"
    shape = tuple(about["shape"])
    if not has_shape:
        is_fine = shape == () and isinstance(leaf, bool | int | float | complex)
        return "" if is_fine else f"{leaves.shown(path)} has the shape {shape}, and the template a {type(leaf).__name__}"
    if about["kind"] == "key" or leaves.is_key(leaf):
        return "" if about["kind"] == "key" and leaves.is_key(leaf) else f"{leaves.shown(path)} is a PRNG key on one side alone"
    if shape != tuple(leaf.shape):
        return f"{leaves.shown(path)} has the shape {shape}, and the template {tuple(leaf.shape)}"
    if not cast and str(leaf.dtype) != about["dtype"]:
        return f"{leaves.shown(path)} is {about['dtype']}, and the template {leaf.dtype}: cast=True converts"
    return ""


def is_narrowed(dtype: Any) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def would_narrow(about: dict[str, Any], target: Any) -> bool:
    """Returns whether JAX would cut the numbers of a leaf for which the template names no dtype."""
    return about["kind"] == "array" and not hasattr(target, "dtype") and is_narrowed(leaves.dtype_of(about["dtype"]))


def _holds(dtype: Any, kind: str, text: Any, cast: bool) -> bool:
    """Returns whether a dtype takes a Python number as JAX's arithmetic would: a float may be rounded, but is no whole number."""
    if kind == "int" and jax.numpy.issubdtype(dtype, jax.numpy.integer):
        limits = jax.numpy.iinfo(dtype)
        return int(limits.min) <= int(text) <= int(limits.max)
    classes = (jax.numpy.bool_, jax.numpy.integer, jax.numpy.floating, jax.numpy.complexfloating)
    return any(jax.numpy.issubdtype(dtype, each) for each in classes[0 if cast and kind != "complex" else leaves.NUMBERS.index(kind) :])


def sharding_of(target: Any) -> Any:
    """Returns where the template wants a leaf. None: nowhere, as an array that JAX may move to the device of another one."""
    is_placed = isinstance(target, jax.Array | jax.ShapeDtypeStruct) and getattr(target, "committed", True)
    if not is_placed or isinstance(getattr(target.sharding, "mesh", None), jax.sharding.AbstractMesh):  # as eval_shape gives: it has no devices
        return None
    return target.sharding
