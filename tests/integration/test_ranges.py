"""Of a version in an object store, a load reads the ranges that it needs, and the ranks of a node read each of them once."""

from __future__ import annotations

import pytest
from test_object_stores import run_beside

# A file of 64 MiB: eight tensors of 8 MiB.
BEGIN = """
import subprocess
import torch, torch.distributed.checkpoint as dcp
import nebulaml as nm
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter
path, COUNT, TENSOR, CHUNK = test.STORES[sys.argv[2]].path, 8, 8 << 20, 4 << 20
test.prepare(sys.argv[2])

def values(number):
    return torch.arange(TENSOR // 4, dtype=torch.float32) + number

def zeros(*numbers):
    return {f"w{number}": torch.zeros(TENSOR // 4) for number in numbers}

def check(found, *numbers):
    assert all(torch.equal(found[f"w{number}"], values(number)) for number in numbers)

def bytes_of_agent():
    said = subprocess.run([os.environ["NEBULA_AGENT_PATH"], "metrics"], capture_output=True, text=True, timeout=60)
    lines = [line for line in said.stdout.splitlines() if line.startswith("nebula_storage_bytes_total") and 'direction="read"' in line]
    return sum(int(float(line.split()[-1])) for line in lines)

def read_by(load):
    before = bytes_of_agent()
    load()
    return bytes_of_agent() - before

def check_read(load, tensors):
    read = read_by(load)
    most = tensors * (TENSOR + CHUNK)  # a tensor begins and ends inside of chunks
    assert tensors * TENSOR <= read <= most + 2 * CHUNK + (1 << 20), read / CHUNK  # pickle, directory, documents
"""

LOADS = """
state = {f"w{number}": values(number) for number in range(COUNT)}
manager = nm.Manager(path)
manager.save(1, {"model": state})
dcp.save({f"w{number}": state[f"w{number}"] for number in (2, 3, 4)}, storage_writer=NebulaStorageWriter(path + "/step7"))
nm.flush_persistence()
manager.wait()
manager.close()
test.lose_memory()

nm.get_checkpoint("step7")  # starts an agent
dcp_found, found, again = zeros(3), zeros(0, 1, 2, 3, 4, 5, 6, 7), zeros(0, 1, 2, 3, 4, 5, 6, 7)
check_read(lambda: dcp.load(dcp_found, storage_reader=NebulaStorageReader(path + "/step7")), 1)
check(dcp_found, 3)
manager = nm.Manager(path)
check_read(lambda: manager.restore({"model": found}, step=1, keys=["model.w2", "model.w5"]), 2)
check(found, 2, 5)
assert not found["w3"].any()
assert read_by(lambda: manager.restore({"model": again}, step=1, keys="model.w5", strict=False)) < CHUNK  # the agent has it
check(again, 5)
short = {"w6": torch.zeros(TENSOR // 4), "other": torch.zeros(3)}
check_read(lambda: manager.restore({"model": short}, step=1, keys=["model.w6", "model.other"], strict=False), 1)
check(short, 6)
rest = read_by(lambda: manager.restore({"model": found}, step=1))  # what is not there yet
assert rest <= (COUNT - 3) * TENSOR, rest / CHUNK
check(found, *range(COUNT))
print("loaded")
"""

# The agent dies between two reads of one map.
AGENT_DIES = """
nm.init(path, 0, on_error="raise")
with nm.Checkpoint("global_step1") as checkpoint:
    checkpoint.save("model.pt", {f"w{number}": values(number) for number in range(COUNT)})
nm.flush_persistence()
test.lose_memory()
mapped = nm.get_checkpoint("global_step1")._map("model.pt", lazily=True)
mapped.fetch_headers()
places = mapped.records()
view = memoryview(mapped)

def read(number):
    offset, size = places[f"archive/data/{number}"]
    mapped.fetch(offset, size)
    assert torch.equal(torch.frombuffer(view[offset : offset + size], dtype=torch.float32), values(number))

read(1)
test.lose_memory()
read(6)
read(1)
target = torch.zeros(TENSOR // 4)
test.lose_memory()
mapped.read([(*places["archive/data/4"], target.data_ptr())])
assert torch.equal(target, values(4))
mapped.fetch(0, len(view))
for number in range(COUNT):
    read(number)
print("loaded")
"""


@pytest.mark.parametrize("name", ["gs", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("azure", "s3"))])
def test_loads_read_the_ranges_that_they_need_from_an_object_store(name, tmp_path):
    assert "loaded" in run_beside(name, tmp_path, BEGIN + LOADS)


@pytest.mark.nightly
def test_a_map_outlives_the_agent_that_has_read_its_first_ranges(tmp_path):
    assert "loaded" in run_beside("s3", tmp_path, BEGIN + AGENT_DIES)
