"""A committed checkpoint survives every kind of end of its process, although its copies still run after the commit: the end waits for them."""

from __future__ import annotations

import os
import signal

import fork_server
import nebulaml
import pytest

NIGHTLY = bool(os.environ.get("NEBULA_TEST_NIGHTLY"))
FLOATS = (16 if NIGHTLY else 4) << 20  # 16 MiB in each of two files: milliseconds of copying after the commit

HEAD = f"""
import gc
gc.unfreeze()  # the interpreter's end looks at all objects (trainers.py)
import atexit, ctypes, faulthandler, multiprocessing, threading, weakref
os.environ["NEBULA_CAPTURE"] = "cow"
PATH = sys.argv[1]
torch.full((1,), 0.0)  # torch imports modules of its own at the first
def commit(step, floats={FLOATS}, parts=2, **options):
    nm.init(PATH, 3600, 20, **options)
    with nm.Checkpoint(f"global_step{{step}}") as checkpoint:
        for part in range(parts):
            assert checkpoint.save(f"{{part}}.pt", torch.full((floats,), float(step)))
    assert not checkpoint._lost_files and checkpoint._failure is None
    return checkpoint
def die(number):
    os.kill(os.getpid(), number)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def whole_end(monkeypatch):
    monkeypatch.setenv(fork_server.WHOLE_END, "1")


@pytest.fixture(autouse=True)
def no_core(monkeypatch):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)


def ended(place, code, returncode=0):
    return place.run(HEAD + code, place.storage, returncode=returncode)


def check_newest(place, step=1, files=("0.pt", "1.pt")):
    nebulaml.init(str(place.storage), 3600, 2)
    found = nebulaml.get_latest_checkpoint()
    assert found is not None and found.tag == f"global_step{step}" and sorted(found.files) == sorted(files)
    for name in files:
        loaded = found.load(name)
        assert loaded.min() == loaded.max() == step


# Each commits the step that it is given, in a child, and waits for that child.
IN_CHILD = """
import pathlib
from concurrent.futures import ProcessPoolExecutor
import torch.multiprocessing
class Data(torch.utils.data.Dataset):
    def __init__(self, step): self.step = step
    def __len__(self): return 1
    def __getitem__(self, index): commit(self.step); return 0
def work(step): commit(step); return step
def in_process(step, target=work, kind="fork"):
    process = multiprocessing.get_context(kind).Process(target=target, args=(step,)); process.start(); process.join()
    assert process.exitcode == 0
def in_process_of_process(step): in_process(step, in_process)
def in_pool(step):
    with multiprocessing.get_context("fork").Pool(1) as pool: assert pool.map(work, [step]) == [step]
def in_executor(step):
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool: assert pool.submit(work, step).result() == step
def in_start_processes(step):
    torch.multiprocessing.start_processes(lambda rank: commit(step), nprocs=1, start_method="fork")
def in_data_loader(step): list(torch.utils.data.DataLoader(Data(step), num_workers=1, multiprocessing_context="fork"))
def in_fork(step, end=os._exit):
    pid = os.fork()
    if pid == 0:
        commit(step)
        end(9)
    assert os.waitpid(pid, 0)[1] in (9, 9 << 8)
def in_fork_of_c(step): in_fork(step, ctypes.CDLL(None)._exit)
def in_fork_that_is_killed(step): in_fork(step, lambda number: os.kill(os.getpid(), number))
def in_fork_server(step):
    pathlib.Path("forked.py").write_text("import os, sys, time, torch\\nimport nebulaml as nm\\n" + HEAD.replace("sys.argv[1]", repr(PATH)))
    sys.path.insert(0, os.getcwd())
    import forked
    in_process(step, forked.commit, "forkserver")
WAYS = [in_process, in_process_of_process, in_pool, in_executor, in_start_processes, in_data_loader, in_fork, in_fork_of_c,
        in_fork_that_is_killed, in_fork_server]
"""


# fault (Deaths): A forked child (`multiprocessing`, a data loader's worker, a notebook's launcher) ends, in any way.
# result: Its files are there: its saves return when their bytes are copied.
@pytest.mark.parametrize("parent", [pytest.param("without a session", marks=pytest.mark.nightly), "with a session"])
def test_commits_of_a_forked_child_survive_its_end(place, parent):
    before = "commit(0, 10)\n" if parent == "with a session" else ""
    last = -1 if before else None  # a process that a server has forked is not a child of the parent: it is another trainer, which is refused
    ways = ("WAYS" if NIGHTLY else "[in_process, in_data_loader, in_fork_that_is_killed, in_fork_server]") + f"[:{last}]"
    code = f"HEAD = {HEAD!r}\n{before}{IN_CHILD}for step, way in enumerate({ways}, 1): way(step); say(way.__name__)"
    ways = ended(place, code).split()
    nebulaml.init(str(place.storage), 3600, 2)
    for step, way in enumerate(ways, 1):
        found = nebulaml.get_checkpoint(f"global_step{step}")
        assert found is not None and sorted(found.files) == ["0.pt", "1.pt"], way
        for name in found.files:
            assert (found.load(name) == step).all(), way
    assert len(ways) == (10 if NIGHTLY else 4) - bool(before)


# fault: as test_commits_of_a_forked_child_survive_its_end
@pytest.mark.nightly("test_commits_of_a_forked_child_survive_its_end")
def test_all_saves_of_workers_of_a_pool_and_of_a_data_loader_are_kept(place):
    ended(
        place,
        """
nm.init(PATH, 3600, 20)
def keep(tag):
    checkpoint = nm.Checkpoint(tag)
    for part in range(3): assert checkpoint.save(f"{part}.pt", torch.full((1 << 20,), float(part)))
    return checkpoint.commit()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return int(keep(f"loaded{index}"))
with multiprocessing.get_context("fork").Pool(2) as pool: assert all(pool.map(keep, [f"pooled{n}" for n in range(4)]))
assert sum(list(torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=None, multiprocessing_context="fork"))) == 4
""",
    )
    nebulaml.init(str(place.storage), 3600, 20)
    for tag in [f"{kind}{n}" for kind in ("pooled", "loaded") for n in range(4)]:
        found = nebulaml.get_checkpoint(tag)
        assert found is not None and sorted(found.files) == ["0.pt", "1.pt", "2.pt"], tag
        for part in range(3):
            assert (found.load(f"{part}.pt") == part).all()


AT_ONCE = {
    "os._exit": ("commit(1); os._exit(3)", 3),
    "os.execv": ("commit(1); os.execv('/bin/sh', ['sh', '-c', 'exit 4'])", 4),
    "os.execvp, imported before": ("from os import execvp\ncommit(1); execvp('sh', ['sh', '-c', 'exit 4'])", 4),
    "exit of C": ("commit(1); ctypes.CDLL(None).exit(5)", 5),
    "quick_exit": ("commit(1); ctypes.CDLL(None).quick_exit(5)", 5),
    "sys.exit": ("commit(1); sys.exit(6)", 6),
    "sys.exit in a thread": ("t = threading.Thread(target=lambda: (commit(1), sys.exit(6))); t.start(); t.join()", 0),
    "an exception": ("commit(1); raise SystemError('of the test')", 1),
    "Ctrl-C": ("commit(1); die(signal.SIGINT)", -signal.SIGINT),
    "a daemon thread that is still there": ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); commit(1)", 0),
    "os.abort": ("commit(1); os.abort()", -signal.SIGABRT),
    "os.abort with faulthandler": ("faulthandler.enable(); commit(1); os.abort()", -signal.SIGABRT),
    "a crash": ("commit(1); ctypes.string_at(0)", -signal.SIGSEGV),
    "a crash with faulthandler, enabled later": ("commit(0, 1 << 20); faulthandler.enable(); commit(1); ctypes.string_at(0)", -signal.SIGSEGV),
    "a crash in a thread": ("commit(1); threading.Thread(target=ctypes.string_at, args=(0,)).start(); time.sleep(60)", -signal.SIGSEGV),
    "SIGTERM after the default was put back": (
        "commit(1); signal.signal(signal.SIGTERM, signal.SIG_DFL); die(signal.SIGTERM)", -signal.SIGTERM),
    "raise_signal after the default was put back": (
        "commit(1); signal.signal(signal.SIGTERM, signal.SIG_DFL); signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "a handler that commits and goes on to the default": (
        """
def last(number, frame):
    commit(1)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, last)
commit(0, 10)
die(signal.SIGTERM)""", -signal.SIGTERM),
    "a handler that ends it by os._exit": ("signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); commit(1); die(signal.SIGTERM)", 7),
    "kill of C, twice": ("commit(1); ctypes.CDLL(None).kill(os.getpid(), 15); ctypes.CDLL(None).kill(os.getpid(), 15); time.sleep(60)", -signal.SIGTERM),
}  # fmt: skip

DAILY = ("os._exit", "os.execv", "sys.exit", "a crash", "a handler that commits and goes on to the default")


# fault (Deaths): The trainer ends right after its commit, while copies still run: a normal end, `os._exit`,
# `os.exec...`, a signal that it does not handle, `abort`, a crash.
# result: The end waits for the copies, 300 s at most, 30 s after a signal. The version can be loaded. Exceptions:
# SIGKILL, and C code that calls `_exit` or `exec` itself.
@pytest.mark.parametrize(
    "end",
    [
        end if end in DAILY else pytest.param(end, marks=pytest.mark.nightly("test_a_committed_version_survives_an_end_right_after_the_commit"))
        for end in AT_ONCE
    ],
)
def test_a_committed_version_survives_an_end_right_after_the_commit(place, end):
    ended(place, *AT_ONCE[end])
    check_newest(place)


# fault: as test_a_committed_version_survives_an_end_right_after_the_commit
@pytest.mark.parametrize("number", ["SIGTERM", "SIGFPE", *(pytest.param(one, marks=pytest.mark.nightly("test_a_committed_version_survives_a_signal_from_outside")) for one in ("SIGHUP", "SIGUSR1"))])
def test_a_committed_version_survives_a_signal_from_outside(place, number):
    """A fork of this process sends the signal, so that no call of the program is waiting."""
    code = f"""
import subprocess
sender = subprocess.Popen(["sh", "-c", f"read go; kill -{number[3:]} {{os.getpid()}}"], stdin=subprocess.PIPE)
faulthandler.disable()
commit(1)
os.write(sender.stdin.fileno(), b"go\\n")
time.sleep(60)
"""
    ended(place, code, -getattr(signal, number))
    check_newest(place)


@pytest.mark.nightly("test_a_committed_version_survives_a_signal_from_outside")
def test_a_signal_that_the_program_handles_or_ignores_stays_the_programs(place):
    output = ended(
        place,
        """
signal.signal(signal.SIGUSR1, lambda *_: say("handled"))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
commit(1)
os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGHUP)
say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
nm.flush_persistence()
status = [line for line in open("/proc/self/status") if line.startswith("SigCgt")][0]
say("caught" if int(status.split()[1], 16) >> (signal.SIGTERM - 1) & 1 else "left")
""",
    )
    assert output.split() == ["handled", "True", "left"]  # of no copy under way nothing is held up


# fault (Deaths): A program forks while copies run.
# result: The child waits for none of them and disturbs none.
@pytest.mark.nightly("python/test_cow.py::test_a_forked_child_can_write_and_end")
def test_a_fork_while_copies_run_neither_waits_for_them_nor_disturbs_them(place):
    output = ended(
        place,
        """
commit(1)
begun = time.monotonic()
pid = os.fork()
if pid == 0:
    os._exit(0 if time.monotonic() - begun < 5 else 1)
say(os.waitpid(pid, 0)[1])
os.kill(pid := os.fork() or os.getpid(), 0)
if pid == os.getpid():
    signal.raise_signal(signal.SIGTERM)
os.waitpid(pid, 0)
commit(2)
""",
    )
    assert output.split() == ["0"]
    check_newest(place, 2)


LATE = {
    "atexit, registered before the import": ("", "EARLY"),
    "atexit, registered after it": ("atexit.register(commit, 1)", ""),
    "weakref.finalize": ("class Thing: pass\nthing = Thing(); weakref.finalize(thing, commit, 1)", ""),
    "threading's own exit": ("threading._register_atexit(commit, 1)", ""),
    "a thread that outlives the main one": ("threading.Thread(target=lambda: (time.sleep(0.3), commit(1))).start()", ""),
    "__del__ of a global in a cycle": ("class Thing:\n    def __del__(self): commit(1)\nthing = Thing(); thing.me = thing", ""),
    "__del__ of a global behind a session": ("commit(0, 10)\nclass Thing:\n    def __del__(self): commit(1)\nthing = Thing()", ""),
    "__del__ of a global, loading too": (
        "commit(0, 10)\nclass Thing:\n    def __del__(self): assert nm.get_latest_checkpoint() is not None; commit(1)\nthing = Thing()", ""),
}  # fmt: skip


# fault (Deaths): A save runs while the interpreter ends: `atexit`, `weakref.finalize`, a thread, `__del__` of a
# global.
# result: Its file is there.
@pytest.mark.parametrize("is_global", [False, pytest.param(True, marks=pytest.mark.nightly("test_saves_of_each_kind_while_the_interpreter_ends_are_kept"))])
def test_saves_of_each_kind_while_the_interpreter_ends_are_kept(place, is_global):
    """In two processes: what the first kinds leave would keep the globals of the others until `commit` is gone."""
    code, kinds = "", [kind for kind, (_, is_early) in LATE.items() if not is_early and ("global" in kind) == is_global]
    for step, kind in enumerate(kinds, 1):
        one = LATE[kind][0].replace("commit(0, 10)\n", "").replace("commit, 1", f"commit, {step}").replace("commit(1)", f"commit({step})")
        code += one.replace("Thing", f"Thing{step}").replace("thing", f"thing{step}") + "\n"
    ended(place, ("commit(0, 10)\n" if is_global else "") + code)
    nebulaml.init(str(place.storage), 3600, 2)
    for step, kind in enumerate(kinds, 1):
        found = nebulaml.get_checkpoint(f"global_step{step}")
        assert found is not None and sorted(found.files) == ["0.pt", "1.pt"], kind
        assert all((found.load(name) == step).all() for name in found.files), kind


# fault: as test_saves_of_each_kind_while_the_interpreter_ends_are_kept
@pytest.mark.nightly("test_saves_of_each_kind_while_the_interpreter_ends_are_kept")
@pytest.mark.parametrize("end", list(LATE))
def test_a_save_while_the_interpreter_ends_is_kept(place, end):
    code, when = LATE[end]
    if when:
        code = f"""
import subprocess
text = {HEAD!r} + "pass"
sys.exit(subprocess.call([sys.executable, "-W", "ignore", "-c", "import atexit, os, signal, sys, time\\natexit.register(lambda: commit(1))\\n"
    "import torch\\nimport nebulaml as nm\\n" + text, PATH]))
"""
    ended(place, code)
    check_newest(place)


# fault: as test_saves_of_each_kind_while_the_interpreter_ends_are_kept
@pytest.mark.nightly("test_saves_of_each_kind_while_the_interpreter_ends_are_kept")
def test_a_daemon_thread_that_saves_until_the_end_loses_nothing_that_it_was_told_is_committed(place):
    code = """
begun = threading.Event()
def save():
    for step in range(1, 10000):
        commit(step, 1 << 20, 1)
        say(step)
        begun.set()
threading.Thread(target=save, daemon=True).start()
begun.wait()
time.sleep(0.2)
"""
    trainer = place.trainer(HEAD + code, place.storage)
    output, _ = trainer.communicate(timeout=120)
    # Python ends a daemon thread where it stands. Within an operation of torch's that is std::terminate, with or without Nebula.
    assert trainer.returncode in (0, -signal.SIGABRT)
    nebulaml.init(str(place.storage), 3600, 2)
    found = nebulaml.get_latest_checkpoint()
    assert found.step >= int(output.split()[-1]) > 0 and (found.load("0.pt") == found.step).all()


def test_an_end_within_a_with_block_leaves_the_version_before(place):
    ended(place, "commit(1)\nwith nm.Checkpoint('global_step2') as c:\n    c.save('0.pt', torch.ones(FLOATS)); os._exit(0)".replace("FLOATS", str(FLOATS)))
    check_newest(place)


@pytest.mark.nightly("test_commits_of_a_forked_child_survive_its_end")
def test_spawned_children_end_as_any_program(place):
    ended(
        place,
        """
import subprocess
commit(1)
assert subprocess.run(["true"]).returncode == 0
assert os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)[1] == 0
say(signal.Signals(int(subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode * -1)).name)
""",
    )
    check_newest(place)
