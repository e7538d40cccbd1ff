"""The calls of a GPU's driver, with a driver that copies memory of the process (fake_driver.c)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_driver.c")

PROGRAM = """
import ctypes, struct, sys
ctypes.CDLL(sys.argv[1])
from nebulaml import _nebula

PIECE = struct.Struct("=QQQ")
SIZES = [1, 3, 7, 4096, 65537]

def address(array):
    return ctypes.addressof(array)

class Stream(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("lists", "singles", "refuses_lists", "error")]

def memory(values):
    return [(ctypes.c_char * size).from_buffer_copy(bytes([value % 251 for value in range(size)]) if values else bytes(size)) for size in SIZES]

def packed(to, sources):
    return b"".join(PIECE.pack(address(target), address(source), size) for target, source, size in zip(to, sources, SIZES))

def run(copy, *more, **settings):
    sources, targets, stream = memory(True), memory(False), Stream(**settings)
    copy(address(stream), packed(targets, sources), *more)
    assert [target.raw for target in targets] == [source.raw for source in sources]
    return stream.lists, stream.singles

buffer = (ctypes.c_char * sum(SIZES))()
into = address(buffer)
"""


def driver_says(tmp_path, text):
    library = tmp_path / "libcuda.so.1"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, SOURCE], check=True)
    done = subprocess.run([sys.executable, "-c", PROGRAM + text, library], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("copy", ["_nebula.copy_from_device", "_nebula.copy_to_device, into"])
def test_all_pieces_go_in_one_call_if_the_driver_takes_lists_and_else_each_in_its_own(tmp_path, copy):
    told = driver_says(tmp_path, f"print(*run({copy}), *run({copy}, False), *run({copy}, refuses_lists=1))")
    assert told == ["1", "0", "0", "5", "0", "5"]


def test_copies_to_a_device_leave_from_the_buffer(tmp_path):
    driver_says(tmp_path, "run(_nebula.copy_to_device, into)\nassert buffer.raw == b''.join(each.raw for each in memory(True))")


@pytest.mark.parametrize("copy", ["copy_from_device(address(stream), pieces)", "copy_to_device(address(stream), pieces, into)"])
def test_the_driver_says_why_it_refuses(tmp_path, copy):
    text = f"""
stream, targets = Stream(error=2), memory(False)
pieces = packed(targets, memory(True))
try:
    _nebula.{copy}
except RuntimeError as failure:
    assert str(failure) == "the driver of the GPU refuses to copy: out of memory (error 2)", failure
else:
    raise SystemExit("no error")
stream.error = 0
_nebula.copy_from_device(address(stream), b"")
_nebula.copy_to_device(address(stream), b"", into)
assert not stream.lists and not stream.refuses_lists
"""
    driver_says(tmp_path, text)
