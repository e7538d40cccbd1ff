"""Programs that read torch files or zip archives read the images that the C core writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# The dtypes by their number in include/nebula.h.
DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
]  # fmt: skip


def find_tool() -> Path | None:
    """Returns image_tool: from the environment, else from the newest build directory."""
    if "NEBULA_IMAGE_TOOL" in os.environ:
        return Path(os.environ["NEBULA_IMAGE_TOOL"])
    built = [*ROOT.glob("build*/tests/unit/image_tool"), *ROOT.glob("build*/tests/unit/image/image_tool")]
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


TOOL = find_tool()
pytestmark = pytest.mark.skipif(TOOL is None, reason="image_tool is not built (make units)")


def tool(*arguments: object) -> str:
    command = [str(TOOL), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def payload(size: int, is_bool: bool = False) -> bytes:
    return bytes(k * 7 % 251 & (1 if is_bool else 255) for k in range(size))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())


WAYS = [
    pytest.param({"mmap": mmap, "weights_only": weights_only}, id=f"mmap={mmap},weights_only={weights_only}")
    for mmap in (False, True)
    for weights_only in (False, True)
]


@pytest.mark.parametrize("way", WAYS)
def test_every_dtype_comes_back_with_its_bytes(tmp_path: Path, way: dict[str, bool]) -> None:
    path = tmp_path / "all.pt"
    tool("write", path, *(f"t{k}:{k}:3x5" for k in range(len(DTYPES))))
    state = torch.load(path, **way)
    assert list(state) == [f"t{k}" for k in range(len(DTYPES))]
    for tensor, dtype in zip(state.values(), DTYPES, strict=True):
        assert tensor.dtype == dtype
        assert tensor.shape == (3, 5)
        assert tensor.is_contiguous()
        assert raw(tensor) == payload(15 * dtype.itemsize, dtype == torch.bool)


@pytest.mark.parametrize("way", WAYS)
def test_scalars_empty_tensors_and_names_of_any_letters(tmp_path: Path, way: dict[str, bool]) -> None:
    path = tmp_path / "odd.pt"
    tool(
        "write",
        path,
        "scalar:8:",
        "empty:7:0",
        "flat:4:3x0x7",
        "größe 漢字:0:3",
        "deep:0:1x1x1x1x1x2x1x1x1x1x1x1x1x1x1x1",
    )
    state = torch.load(path, **way)
    assert [tuple(tensor.shape) for tensor in state.values()] == [
        (),
        (0,),
        (3, 0, 7),
        (3,),
        (1, 1, 1, 1, 1, 2, *[1] * 10),
    ]
    assert raw(state["größe 漢字"]) == payload(3)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_no_tensors_is_an_empty_dict(tmp_path: Path, way: dict[str, bool]) -> None:
    tool("write", tmp_path / "none.pt")
    assert torch.load(tmp_path / "none.pt", **way) == {}


@pytest.mark.nightly("python/test_values.py::test_many_small_tensors_come_back")
def test_thousands_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    count = 3000
    tool("write", path, *(f"p{k}:7:{k % 40}" for k in range(count)))
    state = torch.load(path, mmap=True)
    assert len(state) == count
    assert all(raw(tensor) == payload(k % 40 * 4) for k, tensor in enumerate(state.values()))
    assert zipfile.ZipFile(path).testzip() is None


def test_payloads_are_aligned_and_checksums_are_those_of_zlib(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    tool("write", path, "a:7:1000x300", "b:0:7", "c:4:5x5")
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for record in archive.infolist():
            header = record.header_offset
            name_size, extra_size = (int.from_bytes(data[header + at : header + at + 2], "little") for at in (26, 28))
            start = header + 30 + name_size + extra_size
            assert start % 64 == 0
            assert zlib.crc32(data[start : start + record.file_size]) == record.CRC
    assert tool("sum", path).split()[0] == f"{zlib.crc32(data):08x}"


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_finds_nothing_wrong(tmp_path: Path) -> None:
    tool("write", tmp_path / "a.pt", "a:7:100x300", "empty:7:0")
    subprocess.run(["unzip", "-tq", str(tmp_path / "a.pt")], check=True, capture_output=True)


@pytest.mark.parametrize("weights_only", [False, True])
def test_records_beyond_four_gib(tmp_path: Path, weights_only: bool) -> None:
    """A sparse file: a record of 4.6 GiB, one whose size is the last that 32 bits hold, and one after both."""
    path = tmp_path / "huge.pt"
    tool("sparse", path, "huge:7:1150x1048576", "edge:0:4294967294", "marker:0:4294967295", "tail:4:6")
    with zipfile.ZipFile(path) as archive:
        assert [record.file_size for record in archive.infolist()][3:] == [1150 << 22, 4294967294, 4294967295, 48]
        assert archive.infolist()[-1].header_offset > 1 << 32
    state = torch.load(path, mmap=True, weights_only=weights_only)
    assert state["huge"].shape == (1150, 1048576)
    assert state["edge"].shape == (4294967294,)
    assert state["marker"].shape == (4294967295,)
    assert state["huge"][-1, -1] == 0
    assert torch.equal(state["tail"], torch.zeros(6, dtype=torch.int64))
    assert tool("find", path, "tail").split(":")[0].split() == ["4", "6"]


def test_c_finds_the_tensors_that_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    tool("write", path, "a:7:10x20", "é:11:5")
    assert tool("find", path, "a") == f"7 10 20 : {zlib.crc32(payload(800)):08x}\n"
    assert tool("find", path, "é") == f"11 5 : {zlib.crc32(payload(5, True)):08x}\n"


def test_c_finds_the_tensors_that_torch_save_wrote(tmp_path: Path) -> None:
    path = tmp_path / "stock.pt"
    whole = torch.arange(60, dtype=torch.int32).reshape(6, 10)
    state = {"model": torch.nn.Linear(4, 3).state_dict(), "moments": [whole, whole[2:4]], "column": whole[:, 1], "a": {"b": whole}, "a.b": whole, "step": 7}
    state |= {"half": torch.zeros(3, dtype=torch.float8_e5m2)}
    torch.save(state, path)
    assert tool("find", path, "model.weight") == f"7 3 4 : {zlib.crc32(raw(state['model']['weight'])):08x}\n"
    assert tool("find", path, "moments.1") == f"3 2 10 : {zlib.crc32(whole[2:4].numpy().tobytes()):08x}\n"
    for name, refusal in {
        "column": "not contiguous", "half": "of a type", "a.b": "two tensors", "step": 'no tensor "step" among the 8', "model": "no tensor",
    }.items():  # fmt: skip
        with pytest.raises(subprocess.CalledProcessError, match="status 1") as raised:
            tool("find", path, name)
        assert refusal in raised.value.stderr


def test_files_that_torch_save_wrote_are_verified(tmp_path: Path) -> None:
    path = tmp_path / "stock.pt"
    torch.save({"w": torch.arange(100_000.0), "n": 3}, path)
    tool("verify", path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(5.0).numpy().tobytes()) + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        tool("verify", path)
    assert "data/0" in raised.value.stderr
