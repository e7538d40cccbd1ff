"""The files of a checkpoint, whole or by ranges: of a version of Nebula, or of a directory that a framework has written."""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

from .. import _nebula
from .._session import about, config
from ..errors import NebulaCorrupt, NebulaNotFound

__all__ = ["Directory", "File", "Files", "Published", "Version"]

FRESH_BYTES = 1 << 30  # an object store's bytes stay in memory as long as their map: take a new one after so many


class File:
    """One file. ``map`` is a map as the loading code takes it; read() leaves no bytes in it."""

    def __init__(self, files: Files, name: str) -> None:
        self._files, self.name = files, name
        self.map: Any = files.open(name)
        self.size = len(memoryview(self.map))
        self._read = 0

    def read(self, offset: int, size: int, address: int) -> None:
        """Reads verified bytes to an address."""
        if self._read > FRESH_BYTES:
            self.map, self._read = self._files.open(self.name), 0
        if not 0 <= offset <= offset + size <= self.size:
            raise NebulaCorrupt(f"{self._files}: bytes {offset} to {offset + size} are wanted of {self.name}, which has {self.size}")
        self.map.read([(offset, size, address)])
        self._read += size

    def bytes(self, offset: int, size: int) -> bytes:
        content = bytearray(size)
        if size:
            self.read(offset, size, _nebula.address_of(memoryview(content)))
        return bytes(content)


class Files:
    """The names and sizes of the files, and their maps. str() of it is for messages."""

    names: dict[str, int]

    def open(self, name: str) -> Any:
        raise NotImplementedError

    def file(self, name: str) -> File:
        if name not in self.names:
            raise NebulaNotFound(f"{self} has no file {name!r}; it has: {', '.join(sorted(self.names)) or 'none'}")
        return File(self, name)

    def content(self, name: str) -> bytes:
        file = self.file(name)
        return file.bytes(0, file.size)


class Version(Files):
    """A version of Nebula. Its bytes are verified, and come from the fastest place that has them."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.names = {name: size for name, size in checkpoint._all_files().items() if name != about.FILE}

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint.tag!r}"

    def open(self, name: str) -> Any:
        return self.checkpoint._map(name, lazily=True)


class Directory(Files):
    """A directory of plain files, or one file. Nothing can verify them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        config.refuse_unsigned(str(self.path))
        if self.path.is_file():
            found, self._root = [self.path], self.path.parent
        else:
            found, self._root = [one for one in self.path.rglob("*") if one.is_file()], self.path
        self.names = {str(one.relative_to(self._root)): one.stat().st_size for one in found}

    def __str__(self) -> str:
        return str(self.path)

    def open(self, name: str) -> Any:
        with open(self._root / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _PlainMap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else _Empty()


class Published(Files):
    """A version and the directory that an adapter published of it: the framework has written some files there itself."""

    def __init__(self, version: Version, folder: Directory) -> None:
        self._version, self._folder, self.checkpoint = version, folder, version.checkpoint
        self.names = {**folder.names, **version.names}

    def __str__(self) -> str:
        return str(self._version)

    def open(self, name: str) -> Any:
        return (self._version if name in self._version.names else self._folder).open(name)


class _PlainMap(mmap.mmap):
    """A private map of a plain file, with the methods of Nebula's maps. The system reads pages at their first access."""

    def fetch(self, offset: int, size: int) -> None:
        pass

    def fetch_headers(self) -> None:
        pass

    def records(self) -> dict[str, tuple[int, int]]:
        """Returns offset and size of each record of a zip file. Raises NebulaCorrupt if it is none, or a compressed one."""
        places = {}
        try:
            with zipfile.ZipFile(_Raw(self)) as archive:  # type: ignore[arg-type]
                for one in archive.infolist():
                    names, extra = struct.unpack_from("<HH", self, one.header_offset + 26)
                    places[one.filename] = (one.header_offset + 30 + names + extra, one.file_size)
                    if one.compress_type != zipfile.ZIP_STORED:
                        raise NebulaCorrupt(f"record {one.filename} is compressed")
        except (zipfile.BadZipFile, struct.error) as failure:
            raise NebulaCorrupt(str(failure)) from failure
        return places

    def read(self, parts: list[tuple[int, int, int]]) -> None:  # type: ignore[override]
        import ctypes

        base = _nebula.address_of(memoryview(self))
        for offset, size, address in parts:
            ctypes.memmove(address, base + offset, size)


class _Empty(bytearray):
    def fetch(self, offset: int, size: int) -> None:
        pass

    fetch_headers = records = read = fetch


class _Raw:
    """The same map as a file object for zipfile."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._position = memoryview(content), 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._position, len(self._content))[whence]
        self._position = max(start + offset, 0)
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = len(self._content) if size < 0 else self._position + size
        found = bytes(self._content[self._position : end])
        self._position += len(found)
        return found
