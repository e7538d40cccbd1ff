"""Turns a framework's own save routine into a background save.

While `captured(...)` is active on a thread, ``torch.save`` and safetensors' ``save_file`` to a path below `staging` do
not write: the object's values are fixed in a Nebula checkpoint under the path's name. The routine writes every other file
(configuration, tokenizer, JSON) into `staging` as usual. When the checkpoint is durable, the agent puts its files into
`staging`, too, and renames the directory to its final name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from .. import api

SAFETENSORS_DTYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64", "torch.bool": "BOOL",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.complex64": "C64",
}  # fmt: skip


def safetensors_parts(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> list[Any]:
    """Returns the parts of a safetensors file, in the order of the file: [header, tensor, tensor, ...].

    Tensors are ordered by falling alignment and then by name, as the format's own writer does. Raises ValueError for tensors that
    share memory or are not contiguous, and NebulaConfigError for tensors whose values are not plain bytes in memory.
    """
    from ..tensors import dense

    seen: dict[tuple[Any, int], str] = {}
    tensors = {name: dense.to_dense(tensor, f"tensor {name!r} is a") for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} is not contiguous: call .contiguous() on it before saving")
        if tensor.numel():
            other = seen.setdefault((tensor.device, tensor.data_ptr()), name)
            if other != name:
                raise ValueError(f"tensors {other!r} and {name!r} share memory: save only one of them, or a clone")
    header, ordered = safetensors_header(tensors, metadata)
    return [header] + [tensor for _, tensor in ordered if tensor.numel()]


def safetensors_header(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> tuple[bytes, list[tuple[str, Any]]]:
    """Returns the bytes before the tensors of a safetensors file, and the tensors in its order. It reads no values."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        if str(tensor.dtype) not in SAFETENSORS_DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ordered


class Capture:
    """One framework checkpoint in progress: the place of its plain files, and the Nebula checkpoint that holds the rest.

    left_out: matches the names of files that this rank does not save, because another rank saves them.
    """

    def __init__(
        self,
        tag: str,
        staging: str,
        file_count: int | None,
        overlap: bool = False,
        session: Any = None,
        left_out: re.Pattern[str] | None = None,
    ) -> None:
        self.session = session
        self.staging = os.path.abspath(staging)
        self.tag = tag
        self.file_count = file_count
        self.overlap = overlap
        self._left_out = left_out
        self._checkpoint: Any = None

    @property
    def checkpoint(self) -> Any:
        if self._checkpoint is None:
            self._checkpoint = api.Checkpoint(self.tag, self.file_count, session=self.session)
        return self._checkpoint

    def give_up(self, failure: BaseException) -> None:
        """Gives the checkpoint up: the framework's own routine has failed, so it will not be committed."""
        if self._checkpoint is not None:
            self._checkpoint._give_up(f"the save failed: {failure!r:.400}")

    def leaves_out(self, name: str) -> bool:
        return self._left_out is not None and self._left_out.fullmatch(name) is not None

    def name_of(self, path: Any) -> str | None:
        """Returns the name of a file below the staging directory, relative to it. None: the target is elsewhere."""
        if not isinstance(path, (str, os.PathLike)):
            return None
        absolute = os.path.abspath(os.fspath(path))
        return os.path.relpath(absolute, self.staging) if absolute.startswith(self.staging + os.sep) else None


_ATTRIBUTES = ("save", "save_file", "safe_save_file", "_torch_save", "torch_save")
_scan_lock = threading.Lock()  # guards all below
_scanned: dict[str, Any] = {}  # a framework loads thousands of modules: search each once
_found: dict[Any, list[tuple[Any, str]]] = {}
_seen: tuple[int, str] = (0, "")  # the number of modules, and the last one: a search through all takes 10 ms in a busy process


def _targets(*functions: Any) -> list[tuple[Any, str, Any]]:
    """Returns every attribute of a loaded module that is one of those functions: frameworks import them by name."""
    global _seen
    with _scan_lock:
        if any(function not in _found for function in functions):
            _scanned.clear()
            _found.clear()
            _found.update((function, []) for function in functions)
            _seen = (0, "")
        modules = list(sys.modules.items())
        new = (len(modules), modules[-1][0])
        if new == _seen:
            modules = []
        _seen = new
        for name, module in modules:
            if _scanned.get(name) is module:
                continue
            _scanned[name] = module
            names = getattr(module, "__dict__", {})
            for attribute in _ATTRIBUTES:
                value = names.get(attribute)
                for function in functions:
                    if value is function:
                        _found[function].append((module, attribute))
        return [(*place, function) for function in functions for place in _found[function]]


_lock = threading.RLock()  # guards all below
_captures: dict[int, list[Capture]] = {}  # by thread, the innermost last
_ours: dict[Any, Any] = {}  # the function that stands for a writer while any thread captures
_replaced: list[tuple[Any, str, Any]] = []  # (module, attribute, writer)


def _of_this_thread(path: Any) -> tuple[Capture, str] | tuple[None, None]:
    """Returns the innermost capture that a path belongs to, and the file's name in it."""
    for capture in reversed(_captures.get(threading.get_ident(), ())):
        name = capture.name_of(path)
        if name is not None:
            return capture, name
    return None, None


def _standing_for_save(plain: Any) -> Any:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        capture, name = _of_this_thread(f)
        if capture is None or args or kwargs:  # another pickle module or protocol, or the old format
            return plain(obj, f, *args, **kwargs)
        if capture.leaves_out(name):
            return None
        return capture.checkpoint.save(name, obj, capture.overlap)

    return save


def _standing_for_save_file(plain: Any) -> Any:
    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        capture, name = _of_this_thread(filename)
        try:
            parts = None if capture is None else safetensors_parts(tensors, metadata)
        except ValueError:  # the plain function reports the error in its own words, or knows a type that we do not
            parts = None
        if capture is None or parts is None:
            return plain(tensors, filename, metadata=metadata)
        return capture.checkpoint.save_bytes(name, parts, capture.overlap)

    return save_file


def _replace() -> None:
    """Puts our functions in the place of the writers, also in modules that were loaded since another thread began."""
    import torch

    if not _ours:
        _ours[torch.save] = _standing_for_save(torch.save)
    safetensors = sys.modules.get("safetensors.torch")
    if safetensors is not None and safetensors.save_file not in (*_ours, *_ours.values()):
        _ours[safetensors.save_file] = _standing_for_save_file(safetensors.save_file)
    for module, attribute, plain in _targets(*_ours):
        if getattr(module, attribute, None) is plain:
            setattr(module, attribute, _ours[plain])
            _replaced.append((module, attribute, plain))


def _put_back() -> None:
    for module, attribute, plain in _replaced:
        if getattr(module, attribute, None) is _ours[plain]:  # else somebody else has replaced it meanwhile
            setattr(module, attribute, plain)
    _replaced.clear()
    _ours.clear()


@contextlib.contextmanager
def captured(capture: Capture) -> Iterator[Capture]:
    """Redirects the writers on this thread into `capture` until the block ends. Blocks may be nested, and threads may have one each.

    An exception gives the checkpoint up.
    """
    thread = threading.get_ident()
    with _lock:
        _replace()
        _captures.setdefault(thread, []).append(capture)
    try:
        yield capture
    except BaseException as failure:
        capture.give_up(failure)
        raise
    finally:
        with _lock:
            _captures[thread].remove(capture)
            if not _captures[thread]:
                del _captures[thread]
            if not _captures:
                _put_back()
