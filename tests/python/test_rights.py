"""Files and directories have the permissions that the saving program would give them, no matter which program started the agent."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest
from waiting import until

OTHER_GROUP = 54321

SAVES = """
os.umask(int(sys.argv[2], 8))
for group in sys.argv[4:5]:
    os.setegid(int(group))
nm.init(sys.argv[1], 0, 2, on_error="raise", job=sys.argv[3])
out = sys.argv[1] + "-out"
checkpoint = nm.Checkpoint("global_step1")
checkpoint.save("sub/m.pt", torch.zeros(1000))
checkpoint.publish("sub/m.pt", out + "/above/best.pt")
checkpoint.commit()
nm.flush_persistence()
os.makedirs(sys.argv[1] + "/native")
open(sys.argv[1] + "/native/file", "w").close()
"""


def below(*roots: Path) -> dict[str, os.stat_result]:
    found = {str(root): root.stat() for root in roots}
    for root in roots:
        for path in root.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the agent has renamed or removed it meanwhile
                found[str(path)] = path.lstat()
    return found


def check(mask: int, *roots: Path) -> None:
    found = below(*roots)
    assert any("manifest-1.json" in path for path in found) and any("record-00000.json" in path for path in found)
    wrong = {
        path: oct(stat.S_IMODE(entry.st_mode))
        for path, entry in found.items()
        if stat.S_IMODE(entry.st_mode) != ((0o777 if stat.S_ISDIR(entry.st_mode) else 0o666) & ~mask)
    }
    assert not wrong


# fault (The machine and other users): Jobs of one agent have different umasks, groups, ACLs or setgid directories.
# result: Files of each job have the rights that its own program would give. The next agent keeps to that.
def test_each_job_has_its_own_umask_though_one_agent_serves_them(place, monkeypatch):
    tight = place.trainer(SAVES + "sys.stdin.read()", place.root / "tight", "077", "tight", stdin=True)  # its agent has that umask
    until(lambda: (place.root / "tight/native/file").exists())
    for mask in ("002", "027"):
        monkeypatch.setenv("NEBULA_OUTPUT_DIR", str(place.root / f"history-{mask}"))
        place.run(SAVES, place.root / f"job-{mask}", mask, mask)
        history = place.root / f"history-{mask}"
        until(lambda history=history: (history / "checkpointHistories.csv").exists())
        check(int(mask, 8), place.root / f"job-{mask}", place.root / f"job-{mask}-out", history)
    check(0o077, place.root / "tight", place.root / "tight-out")
    tight.communicate(timeout=60)
    own = below(place.memory)
    del own[str(place.memory)]
    own |= below(place.runtime / "agent.log", place.runtime / "agent.sock")
    assert own and all(stat.S_IMODE(entry.st_mode) == 0o600 for entry in own.values())


# fault: as test_each_job_has_its_own_umask_though_one_agent_serves_them
def test_the_next_agent_goes_on_with_the_umask_of_the_job(place):
    code = """
    os.umask(int(sys.argv[2], 8))
    nm.init(sys.argv[1], 100000 if sys.argv[3] == "kept" else 0, 2, on_error="raise", job=sys.argv[3])
    for step in (1, 2):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        checkpoint.save("m.pt", torch.zeros(1000))
        checkpoint.commit()
        checkpoint.wait("durable" if step == 1 else "captured", 30)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "kept" else None
    """
    (place.root / "stop").write_text("")
    kept = place.trainer(code.replace('os.kill(os', 'say("saved"); sys.stdin.read(); os.kill(os'), place.storage, "002", "kept", stdin=True)
    assert kept.stdout.readline() == "saved\n"
    place.kill_agent()
    kept.kill()
    kept.communicate(timeout=60)
    place.run(code, place.root / "other", "077", "other")
    until(lambda: (place.storage / "global_step2/.nebula/manifest-1.json").exists())
    until(lambda: not list(place.storage.rglob("tmp-*")))
    check(0o002, place.storage)


# fault: as test_each_job_has_its_own_umask_though_one_agent_serves_them
@pytest.mark.skipif(os.geteuid() != 0, reason="taking another group needs root")
def test_files_have_the_group_of_the_program_that_saves_and_of_a_directory_that_hands_down_its_own(place):
    first = place.trainer(SAVES + "sys.stdin.read()", place.root / "first", "022", "first", stdin=True)
    until(lambda: (place.root / "first/native/file").exists())
    place.run(SAVES, place.root / "second", "022", "second", OTHER_GROUP)
    assert {entry.st_gid for entry in below(place.root / "second", place.root / "second-out").values()} == {OTHER_GROUP}
    shared = place.root / "shared"
    shared.mkdir()
    os.chown(shared, -1, 4711)
    shared.chmod(0o2775)
    place.run(SAVES, shared / "run", "002", "third")
    made = below(shared / "run", shared / "run-out")
    assert {entry.st_gid for entry in made.values()} == {4711}
    assert {stat.S_IMODE(entry.st_mode) for entry in made.values()} == {0o2775, 0o664}
    assert {entry.st_gid for entry in below(place.root / "first").values()} == {os.getegid()}
    first.communicate(timeout=60)
