"""torchtitan's manager through Nebula: a killed run resumes from memory, and torchtitan itself reads the directories."""

import subprocess
import time

from conftest import HERE, LIMIT_S, files_below, full, interpreter
from ports import held_port
from torch.distributed.checkpoint import FileSystemReader
from waiting import until


def job(node, dump, *more, **options):
    return node.run(interpreter("torchtitan"), "torchtitan_job.py", "--dump", node.base / dump, *more, ranks=2, **options)


@full
def test_torchtitan_resumes_bit_for_bit_from_memory_after_sigkill_and_stock_reads_the_directories(node):
    whole = job(node, "stock", "--stock")
    node.environment["NEBULA_STORE_MBPS"] = "0.01"
    job(node, "dump", "--kill-at", 4, check=False)
    folder = node.base / "dump" / "checkpoint"
    assert not (folder / "step-4" / ".metadata").exists()  # memory alone has it
    again = job(node, "dump", "--keep", 2)
    assert again.resumed == 4 and again.losses == whole.losses_after(4)
    ours = [path for path in files_below(folder / "step-6") if not path.startswith(".nebula/")]
    assert ours == files_below(node.base / "stock" / "checkpoint" / "step-6")
    end = time.monotonic() + 30
    while (folder / "step-2").exists():  # keep_latest_k is 2; the agent removes it when the newest is durable
        assert time.monotonic() < end, again.end
        time.sleep(0.05)
    assert (folder / "step-4").exists()
    to_stock = job(node, "dump", "--stock", "--load-step", 4)
    assert to_stock.resumed == 4 and to_stock.losses == whole.losses_after(4)
    from_stock = job(node, "stock", "--load-step", 4)
    assert from_stock.resumed == 4 and from_stock.losses == whole.losses_after(4)


@full
def test_torchtitans_settings_of_loads_and_of_the_last_checkpoint_do_as_in_stock(node):
    whole = job(node, "stock", "--stock")
    job(node, "first")
    initial = ["--initial", node.base / "first" / "checkpoint" / "step-4"]
    again = job(node, "second", *initial)
    assert again.resumed == 4 and again.losses == whole.losses_after(4)
    of_stock = job(node, "stock-model", "--stock", *initial, "--model-only")
    assert job(node, "model", *initial, "--model-only", "--kill-at", 3, check=False).resumed == 0
    again = job(node, "model", *initial, "--model-only")  # its own checkpoint counts now
    assert again.resumed == 2 and again.losses == of_stock.losses_after(2)
    last = [FileSystemReader(node.base / run / "checkpoint" / "step-6").read_metadata().state_dict_metadata for run in ("model", "stock-model")]
    assert last[0].keys() == last[1].keys() and all(str(one.properties.dtype) == "torch.bfloat16" for one in last[0].values())
    exclude = ["--load-step", 4, "--exclude", "lr_scheduler", "--steps", 5]
    assert job(node, "first", *exclude).losses == job(node, "stock", "--stock", *exclude).losses


LOADS = """
from nebulaml.integrations import together, torchtitan

class Found:
    tag, step = "step-4", 4

def find(session, tag=None):
    print(session, tag)
    return found

manager = torchtitan.NebulaCheckpointManager.__new__(torchtitan.NebulaCheckpointManager)
manager._nebula, found = "session", None
together.find, together.from_rank_0 = find, lambda look: listed
torchtitan.CheckpointManager._load = lambda self, step=-1: print("stock", step, self._find_load_step()) or True
torchtitan.NebulaCheckpointManager.dcp_load = lambda self, states, place, *_: print("loads", place)
manager._states_to_load, manager._create_checkpoint_id = lambda model_only: {}, lambda step: f"step-{step}"
for found, listed, step in (None, 7, -1), (None, 7, 3), (Found, 3, -1), (Found, 5, -1), (Found, 5, 4):
    assert manager._load(step)
"""


# fault (Storage): The nodes of a torchtitan job find different checkpoints: after saves, or because one lists the folder later.
# result: All ranks ask together which checkpoint Nebula has, and take what rank 0 lists in the folder.
@full
def test_all_ranks_load_one_checkpoint_and_take_what_rank_0_lists(node):
    done = subprocess.run([interpreter("torchtitan"), "-c", LOADS], env=node.environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines() == [
        "session None", "stock -1 7", "session step-3", "stock 3 3", "session None", "loads step-4", "session None", "stock -1 5",
        "session step-4", "loads step-4",
    ], done.stderr[-2000:]  # fmt: skip


@full
def test_a_manager_that_was_not_closed_ends_in_silence_and_its_checkpoints_stay(node):
    with held_port() as held:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        command = [interpreter("torchtitan"), HERE / "torchtitan_job.py", "--dump", node.base / "dump", "--leave-open"]
        done = subprocess.run(command, env=node.environment | variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert '"step": 6' in done.stdout and "Exception ignored" not in done.stderr, done.stderr
    until((node.base / "dump" / "checkpoint" / "step-6" / ".metadata").exists)
