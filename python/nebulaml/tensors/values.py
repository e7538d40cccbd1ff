"""Values beyond tensors and plain containers that a training program keeps: arrays and numbers of numpy, sets, paths, times.

A pickle is built from stand-ins, whose arguments are checked: no class of the file is called, and nothing takes more memory than its
bytes. ``resolved()`` then puts the values in their places.
"""

from __future__ import annotations

import collections
import datetime
import io
import math
import os
import pathlib
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

from ..errors import NebulaConfigError

__all__ = ["NameReader", "Unknown", "find", "is_weights_only", "resolved", "torch_switch"]

_BUILTINS = {
    kind.__name__: kind for kind in (set, frozenset, list, dict, tuple, int, float, str, bool, complex, bytes, bytearray, range, slice)
} | {"long": int, "xrange": range, "unicode": str}  # as torch.save's protocol calls them
_PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_TIMES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)}
_NUMPYS = ("numpy.core.multiarray", "numpy._core.multiarray")

_DTYPE = re.compile(r"[biufcSU]\d{1,9}")


def _refuse(what: str) -> Any:
    raise pickle.UnpicklingError(what)


class _Call:
    """A function that a pickle may call, but not change, and that is no key of a dict: BUILD sets attributes of other objects."""

    __slots__ = ("_function",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        _refuse("a function has no state")


class _Builtin(_Call):
    """A built-in type, called or as a value."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, *args: Any) -> Any:
        kinds = [type(each) for each in args]
        if kinds in ([str, str], [bytes]) and self.kind is bytearray:
            return bytearray(*args)
        if self.kind is slice or (self.kind in (range, complex) and all(each in (int, float) for each in kinds)):
            return self.kind(*args)
        if (kinds and kinds not in ([list], [tuple], [dict])) or (kinds and self.kind not in (set, frozenset, list, tuple, dict)):
            _refuse(f"{self.kind.__name__} of {', '.join(each.__name__ for each in kinds)}")
        return self.kind(*args)


class _Dtype:
    """Stands for a dtype of numpy."""

    __slots__ = ("_order", "_text")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: Any, *flags: Any) -> None:
        self._text, self._order = text, "|"

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 5 or state[1] not in ("<", ">", "|", "=") or state[2:5] != (None, None, None):
            _refuse("a dtype of numpy with parts")
        self._order = state[1]

    def made(self) -> Any:
        if type(self._text) is not str or not _DTYPE.fullmatch(self._text):
            _refuse(f"numpy's dtype {self._text!r:.40}")
        return sys.modules["numpy"].dtype(self._order + self._text)


class _Array:
    """Stands for an array of numpy, until its content comes."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if type(shape) is not tuple or type(content) is not bytes or not all(type(size) is int and size >= 0 for size in shape):
            _refuse("an array of numpy of another form")
        self.value = _filled(shape, dtype.made(), bool(is_fortran), content)


def _filled(shape: tuple[int, ...], dtype: Any, is_fortran: bool, content: bytes) -> Any:
    if math.prod(shape) * dtype.itemsize != len(content):
        _refuse(f"an array of numpy of shape {shape} with {len(content)} bytes")
    made = sys.modules["numpy"].empty(shape, dtype, "F" if is_fortran else "C")
    made.reshape(-1, order="A")[:] = sys.modules["numpy"].frombuffer(content, dtype) if content else 0
    return made


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    is_plain = isinstance(kind, _Builtin) and kind.kind is sys.modules["numpy"].ndarray and shape == (0,)
    return _Array() if is_plain else _refuse("an array of numpy of another form")


def _scalar(dtype: Any, content: Any) -> Any:
    return _filled((), dtype.made(), False, content)[()] if type(content) is bytes else _refuse("a number of numpy")


def _encoded(text: Any, codec: Any) -> bytes:
    return text.encode("latin1") if type(text) is str and codec == "latin1" else _refuse("bytes of another form")


def _defaultdict(factory: Any = None, *args: Any) -> Any:
    return collections.defaultdict(factory.kind if isinstance(factory, _Builtin) else None if factory is None else _refuse("a factory"))


def _deque(items: Any = (), limit: Any = None) -> Any:
    return collections.deque(items, limit) if type(items) in (list, tuple) else _refuse("a deque")


def _counter(counts: Any = None) -> Any:
    return collections.Counter(counts) if type(counts) is dict else _refuse("a Counter")


def _path(kind: Any) -> Callable[..., Any]:
    return lambda *parts: kind(*parts) if all(type(part) is str for part in parts) else _refuse("a path")


def _time(kind: Any) -> Callable[..., Any]:
    known = (bytes, str, int, float, datetime.timedelta, datetime.timezone)
    return lambda *parts: kind(*parts) if all(type(part) in known for part in parts) else _refuse("a time")


_COLLECTIONS = {"deque": _deque, "defaultdict": _defaultdict, "Counter": _counter}


def find(module: str, name: str) -> Any:
    """Returns what stands for a name in a pickle. None: it is none of the values of this module."""
    if module in ("builtins", "__builtin__") and name in _BUILTINS:
        return _Builtin(_BUILTINS[name])
    if module == "collections" and name in _COLLECTIONS:
        return _Call(_COLLECTIONS[name])
    if module in ("pathlib", "pathlib._local") and name in _PATHS:
        return _Call(_path(_PATHS[name]))
    if module == "datetime" and name in _TIMES:
        return _Call(_time(_TIMES[name]))
    if (module, name) == ("_codecs", "encode"):
        return _Call(_encoded)
    if (module, name) == ("torch", "device"):
        return _Call(sys.modules["torch"].device) if sys.modules.get("torch") else None
    return _find_numpy(module, name) if module.partition(".")[0] == "numpy" else None


def _find_numpy(module: str, name: str) -> Any:
    import numpy

    if module in _NUMPYS and name in ("_reconstruct", "scalar"):
        return _Call(_reconstruct if name == "_reconstruct" else _scalar)
    if (module, name) == ("numpy", "ndarray"):
        return _Builtin(numpy.ndarray)
    return _Call(_Dtype) if (module, name) == ("numpy", "dtype") else None


def resolved(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Returns the value with what the stand-ins stand for. Containers stay the same objects, but for tuples."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (_Array, _Dtype, _Call)):
        return _of(value)
    if not isinstance(value, (dict, list, tuple, collections.deque)):
        return value
    memo[id(value)] = value
    if isinstance(value, tuple):
        parts = [resolved(part, memo) for part in value]
        if any(new is not old for new, old in zip(parts, value, strict=True)):
            memo[id(value)] = tuple(parts)
        return memo[id(value)]
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        new = resolved(part, memo)
        if new is not part:
            value[key] = new
    return value


def _of(stand_in: Any) -> Any:
    if isinstance(stand_in, _Array):
        return stand_in.value if hasattr(stand_in, "value") else _refuse("an array of numpy without content")
    if isinstance(stand_in, _Dtype):
        return stand_in.made()
    return stand_in.kind if isinstance(stand_in, _Builtin) else _refuse("a function")


def torch_switch(variable: str) -> bool:
    """Returns True if a switch of torch.load is set; torch reads it in the same way."""
    return os.environ.get(variable, "0").lower() in ("1", "y", "yes", "true")


def is_weights_only(asked: bool | None) -> bool:
    """Returns whether a load may run no code of its file. asked: the argument of the call."""
    if torch_switch("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return True
    if asked is not None:
        return asked
    text = os.environ.get("NEBULA_WEIGHTS_ONLY", "")
    if text not in ("", "0", "1"):  # "true", taken for no, would run code of the file
        raise NebulaConfigError(f"NEBULA_WEIGHTS_ONLY={text!r} is neither 0 nor 1")
    return text == "1"


class NameReader(pickle.Unpickler):
    """Collects the names that a pickle needs. It looks none of them up."""

    def __init__(self, content: bytes | memoryview) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add((module, name))
        return Unknown

    def persistent_load(self, saved: Any) -> Any:
        return Unknown()


class Unknown:
    """Stands for an object whose class is not looked up."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __new__(cls, *arguments: Any, **keywords: Any) -> Unknown:
        return super().__new__(cls)

    def __call__(self, *arguments: Any, **keywords: Any) -> Unknown:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    extend = add = append
