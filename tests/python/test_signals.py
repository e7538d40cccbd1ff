"""SIGTERM in a trainer, in the processes that it forks or spawns, and in the workers of its data loaders."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import fork_server
import nebulaml as nm
import pytest
from waiting import until

METHODS = ["fork", *(pytest.param(method, marks=pytest.mark.nightly) for method in ("spawn", "forkserver"))]

HEAD = """
import multiprocessing, os, signal, sys, time, torch
import nebulaml as nm
PATH, METHOD = sys.argv[1:3]
def say(*words): os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
def wait_for(condition):
    while not condition(): time.sleep(0.01)
"""

# Its processes import the script by its path.
SCRIPT = """
import os, runpy, sys
os.setsid()
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""

LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1000000
    def __getitem__(self, index): return index
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context=METHOD)
"""


@contextlib.contextmanager
def job(place, code: str, method: str = "fork") -> Iterator[fork_server.Trainer]:
    """Runs a script in a process group of its own, as the processes of a job step are. All of the group end with the block."""
    script = place.root / "job.py"
    script.write_text(HEAD + textwrap.dedent(code))
    process = fork_server.start(SCRIPT, script, place.storage, method, stdin=subprocess.PIPE, cwd=place.root)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def group(leader: int) -> set[int]:
    """Returns the processes of a process group, without those that have ended and are not waited for."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, _, its = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its) == leader and state not in "ZX":
                found.add(int(entry.name))
    return found


def ended(process: fork_server.Trainer, timeout: float = 60) -> tuple[list[str], int]:
    output, _ = process.communicate(timeout=timeout)
    return output.splitlines(), process.returncode


# fault: as test_sigterm_to_the_whole_group_saves_and_the_workers_of_a_loader_live_until_then
@pytest.mark.parametrize("method", METHODS)
def test_a_process_of_the_program_ends_by_terminate_and_so_does_a_pool(place, method):
    with job(place, """
        def work(seconds=600): time.sleep(seconds)
        if __name__ == "__main__":
            with nm.Manager(PATH, save_every_steps=1000) as manager:
                manager.should_save(1)
                context = multiprocessing.get_context(METHOD)
                daemon = context.Process(target=work, daemon=True)
                daemon.start()
                daemon.terminate()
                daemon.join()
                say(daemon.exitcode)
                with context.Pool(2) as pool:
                    pool.map_async(work, range(600, 604))
                    time.sleep(0.5)
                    pool.terminate()
                    pool.join()
                context.Process(target=work, daemon=True).start()
                say("end")
        """, method) as process:  # fmt: skip
        assert ended(process) == (["-15", "end"], 0)


# fault (Deaths): A launcher sends SIGTERM to the trainer and to the workers of its data loader at once.
# result: The workers go on, the trainer saves, and both end. Other processes of the program do what they do without
# Nebula.
@pytest.mark.parametrize("method", METHODS)
def test_sigterm_to_the_whole_group_saves_and_the_workers_of_a_loader_live_until_then(place, method):
    with job(place, LOADER + """
    with nm.Manager(PATH, save_every_steps=10**9) as manager:
        for step, batch in enumerate(loader, 1):
            if step == 2:
                say("training")
            if manager.should_save(step):
                say("first save of", int(batch[0]) == 2 * step - 2)
                manager.save(step, {"step": torch.tensor(step)})
                break
        say("stop requested", manager.stop_requested)
""", method) as process:  # fmt: skip
        assert process.stdout.readline() == "training\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert ended(process) == (["first save of True", "stop requested True"], 0)
        until(lambda: not group(process.pid), 60, "the end of the workers")
    with nm.Manager(place.storage) as manager:
        assert manager.latest_step() is not None


@pytest.mark.parametrize("method", METHODS)
def test_workers_go_on_making_batches_after_sigterm_to_the_whole_group(place, method):
    with job(place, LOADER + """
    with nm.Manager(PATH, save_every_steps=10**9) as manager:
        for step, batch in enumerate(loader, 1):
            manager.should_save(step)
            if step == 2:
                say("training")
                wait_for(lambda: manager.stop_requested)
            if step == 200:
                break
        say("step", step)
""", method) as process:  # fmt: skip
        assert process.stdout.readline() == "training\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert ended(process) == (["step 200"], 0)


# fault: as test_sigterm_to_the_whole_group_saves_and_the_workers_of_a_loader_live_until_then
@pytest.mark.parametrize(
    ("number", "method"),
    [
        (signal.SIGKILL, "fork"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly("test_workers_end_with_their_trainer"))
            for one in ((signal.SIGKILL, "spawn"), (signal.SIGTERM, "fork"), (signal.SIGTERM, "spawn"))
        ),
    ],
)
def test_workers_end_with_their_trainer(place, method, number):
    with job(place, LOADER + """
    manager = nm.Manager(PATH, save_every_steps=10**9)
    iterator = iter(loader)
    next(iterator)
    say("training")
    time.sleep(600)
""", method) as process:  # fmt: skip
        assert process.stdout.readline() == "training\n"
        os.kill(process.pid, number)  # the manager was not asked yet: nothing is to be saved, and SIGTERM ends the trainer
        assert process.wait(60) == -number
        until(lambda: not group(process.pid), 60, "the end of the workers")


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_ends_a_worker_by_sigterm(place, method):
    with job(place, LOADER + """
    with nm.Manager(PATH, save_every_steps=10**9) as manager:
        manager.should_save(1)
        iterator = iter(loader)
        for _ in iterator._workers:
            next(iterator)  # the workers take turns, so each of them runs by then
        for worker in iterator._workers:
            worker.terminate()
            worker.join()
            say(worker.exitcode)
        os._exit(0)  # torch would report the workers that are missing
""", method) as process:  # fmt: skip
        assert ended(process) == (["0", "0"], 0)


def test_a_forked_process_may_have_a_manager_of_its_own(place):
    place.run(
        """
        with nm.Manager(sys.argv[1], save_every_steps=1000) as manager:
            manager.should_save(1)
            if os.fork() == 0:
                with nm.Manager(sys.argv[1] + "-of-child", save_every_steps=1000, world=1) as own:
                    own.should_save(1)
                    signal.raise_signal(signal.SIGTERM)
                    os._exit(7 if own.should_save(2) else 8)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
            assert not manager.should_save(2)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        """,
        place.storage,
    )


def test_a_handler_that_the_program_sets_later_is_called_and_the_notice_still_comes(place):
    place.run(
        """
        came = []
        with nm.Manager(sys.argv[1], save_every_steps=1000) as one, nm.Manager(sys.argv[1] + "2", save_every_steps=1000) as two:
            assert not one.should_save(1) and not two.should_save(1)
            before = signal.getsignal(signal.SIGTERM)
            def later(number, frame):
                came.append(number)
                before(number, frame)
            signal.signal(signal.SIGTERM, later)
            assert not one.should_save(2) and not two.should_save(2)
            signal.raise_signal(signal.SIGTERM)
            assert came == [signal.SIGTERM]
            assert one.should_save(3) and two.should_save(3) and one.stop_requested and two.stop_requested
        assert signal.getsignal(signal.SIGTERM) is later
        """,
        place.storage,
    )


@pytest.mark.parametrize("named", ["SIG_IGN", "SIG_DFL"])
def test_a_program_that_ignores_sigterm_or_puts_the_default_back_is_obeyed_with_a_warning(place, named):
    output = place.run(
        f"""
        import logging
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        with nm.Manager(sys.argv[1], save_every_steps=1000) as manager:
            assert not manager.should_save(1)
            signal.signal(signal.SIGTERM, signal.{named})
            assert not manager.should_save(2) and not manager.should_save(3)
            assert signal.getsignal(signal.SIGTERM) is signal.{named}
        """,
        place.storage,
    )
    assert output.count(f"SIGTERM is no notice any more, because the program has set {named} for it") == 1


def test_a_loop_that_decides_by_itself_when_to_save_hears_of_the_notice(place):
    with job(place, """
        with nm.Manager(PATH) as manager:
            for step in range(1, 10**9):
                manager.save(step, {"w": torch.ones(3)}, force=True)
                if step == 2:
                    say("training")
                if manager.stop_requested:
                    break
        say("end")
        """) as process:  # fmt: skip
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (["end"], 0)


def test_before_the_first_question_or_save_sigterm_ends_the_program(place):
    place.run(
        """
        manager = nm.Manager(sys.argv[1], save_every_steps=1000)
        assert manager.restore({"model": torch.nn.Linear(2, 2)}) is None
        signal.raise_signal(signal.SIGTERM)
        """,
        place.storage,
        returncode=-signal.SIGTERM,
    )


def test_a_manager_that_was_dropped_without_close_leaves_sigterm_to_the_program(place):
    place.run(
        """
        import gc
        manager = nm.Manager(sys.argv[1], save_every_steps=1000)
        manager.should_save(1)
        del manager
        gc.unfreeze()
        gc.collect()
        signal.raise_signal(signal.SIGTERM)
        """,
        place.storage,
        returncode=-signal.SIGTERM,
    )
