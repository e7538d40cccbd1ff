"""ElasticSampler under torchdata's StatefulDataLoader: every rank, of any number of ranks, loads the state that one rank has saved."""

import json
import subprocess

import pytest
from conftest import full, interpreter

JOB = """
import json, sys
import torch, nebulaml as nm
from torchdata.stateful_dataloader import StatefulDataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 50
    def __getitem__(self, index): return index

def steps(world, state, count, workers):
    loaders = []
    for rank in range(world):
        sampler = nm.ElasticSampler(50, global_batch=6, rank=rank, world_size=world, seed=3)
        loaders.append(StatefulDataLoader(Data(), batch_sampler=sampler.batches(2), num_workers=workers))
        if state is not None:
            loaders[-1].load_state_dict(state)
    running = [iter(loader) for loader in loaders]
    taken = [sum((next(one).tolist() for one in running), []) for _ in range(count)]
    return taken, [loader.state_dict() for loader in loaders]

if __name__ == "__main__":
    workers = int(sys.argv[1])
    whole, _ = steps(1, None, 8, 0)
    first, states = steps(2, None, 3, workers)
    second, states = steps(1, states[1], 2, workers)
    third, states = steps(3, states[0], 3, workers)
    print(json.dumps({"whole": whole, "found": first + second + third}))
"""


@full
@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_stateful_dataloader_is_loaded_by_another_number_of_ranks(node, workers):
    script = node.base / "job.py"
    script.write_text(JOB)
    command = [interpreter("torchdata"), script, str(workers)]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["found"] == result["whole"] and len(result["whole"]) == 8
