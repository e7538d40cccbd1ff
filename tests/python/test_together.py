"""Whether the ranks of several nodes have the same file."""

from __future__ import annotations

import zipfile
import zlib

from nebulaml.integrations import together


# fault (Storage): Two nodes find different files at one path, and torch has written them without checksums (set_crc32_options(False)).
# result: No rank loads its file, and all raise.
def test_files_without_checksums_are_compared_by_their_bytes(tmp_path):
    found = []
    for content in (b"step 1", b"step 2"):
        path = tmp_path / content.decode()
        with zipfile.ZipFile(path, "w") as records:
            records.writestr(zipfile.ZipInfo("archive/data/0"), content)
        path.write_bytes(path.read_bytes().replace(zlib.crc32(content).to_bytes(4, "little"), bytes(4)))
        with zipfile.ZipFile(path) as records:
            assert records.infolist()[0].CRC == 0
        found.append(together._fingerprint(str(path)))
    assert found[0] == together._fingerprint(str(tmp_path / "step 1")) != found[1]


# fault (Storage): One node finds a damaged file at a path, of a kind that Python's zipfile does not expect.
# result: All ranks raise, and none waits for the others.
def test_a_damaged_file_is_a_difference_and_no_end_of_the_comparison(tmp_path):
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path, "w") as records:
        records.writestr("\u00e9", b"values")
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))
    assert together._fingerprint(str(path)).startswith(f"{path} cannot be read: ")
