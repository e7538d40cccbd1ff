"""The limits of the system, at their default values: open files, mappings, memory pages."""

from __future__ import annotations

import resource
from pathlib import Path

import nebulaml
import pytest
import torch
from waiting import until

FILES = 600  # more than half of the 1,024 open files that a shell's programs may have


@pytest.fixture
def few_descriptors():
    """Limits processes that are started from now on to 1,024 open files. The limit of this process does not change."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    yield 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


HARD = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, int(sys.argv[2]) or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    def save(step, count):
        with nm.Checkpoint(f"global_step{step}") as c:
            good = all([bool(c.save_bytes(f"part-{n}", [b"%d" % n])) for n in range(count)])
        if good:
            c.wait("durable", 120)
        return c
    nm.init(sys.argv[1], 0, 2)
"""


# fault (Memory): Memory has more files than the agent may have open (`ulimit -n`).
# result: The agent raises its soft limit to the hard one. It keeps half of that open for images and opens the others
# by their names. A trainer keeps none open. If the memory directory is removed, as by `RemoveIPC`, the images that are
# not open are lost.
@pytest.mark.parametrize("hard", [0, pytest.param(1024, marks=pytest.mark.nightly)], ids=["soft", "hard"])
def test_with_1024_open_files_versions_of_many_files_become_durable_and_load(place, hard):
    """Also with this hard limit: then the agent opens images by their names."""
    output = place.run(
        HARD
        + f"""
    for step in (1, 2, 3):
        say(save(step, {FILES}).state)
    say(save(4, 5).state)
    found = [nm.get_checkpoint("global_step3").read_bytes(f"part-{{n}}") for n in range({FILES})]
    say(all(data == b"%d" % n for n, data in enumerate(found)), len(os.listdir("/proc/self/fd")) < 100)
    """,
        place.storage,
        hard,
    )
    assert output.split() == ["durable"] * 4 + ["True", "True"]
    assert (place.runtime / "agent.log").read_text().count("is ready") == 1


# fault (Memory): Images have no names, and memory has more files than the agent may have open (`ulimit -n`).
# result: A save waits for older versions to become durable, as if memory were full. A version that needs more than
# three quarters of the limit fails, says so, and costs no other version.
@pytest.mark.nightly("test_with_1024_open_files_versions_of_many_files_become_durable_and_load")
def test_without_named_images_a_version_of_too_many_files_fails_alone_and_says_why(place, monkeypatch):
    monkeypatch.setenv("NEBULA_MEMORY_DIR", "/proc/nowhere")  # images are memfds then, and need a descriptor each
    output = place.run(
        HARD
        + """
    c = save(1, 1000)
    say(c.state, "files that the agent may open" in str(c.error))
    for step in (2, 3, 4):
        say(save(step, 5).state)
    """,
        place.storage,
        1024,
    )
    assert output.split() == ["failed", "True", "durable", "durable", "durable"]


# fault: as test_with_1024_open_files_versions_of_many_files_become_durable_and_load
@pytest.mark.nightly("test_with_1024_open_files_versions_of_many_files_become_durable_and_load")
def test_loaded_tensors_of_many_files_hold_no_open_files(place, few_descriptors):
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    with nebulaml.Checkpoint("global_step1") as checkpoint:
        for n in range(320):
            checkpoint.save(f"m{n}.pt", torch.full((50_000,), float(n)))  # large enough to be mapped
    checkpoint.wait("durable", 120)
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = nebulaml.get_latest_checkpoint()
    loaded = [found.load(f"m{n}.pt") for n in range(320)]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3
    assert all((tensor == n).all() for n, tensor in enumerate(loaded))


# fault (Memory): Versions have many small files.
# result: Each file takes the pages that it needs, in memory and of the budget. No cost grows faster than the number of
# files.
@pytest.mark.nightly("test_with_1024_open_files_versions_of_many_files_become_durable_and_load")
def test_small_files_take_the_pages_that_they_need(place, monkeypatch):
    """If each small file took 2 MiB, two versions of 300 files would need 1,200 MiB, and 2,000 files would be refused."""
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "64M")
    nebulaml.init(str(place.storage), 1000, 2, on_error="raise")
    for step in (1, 2):
        with nebulaml.Checkpoint(f"global_step{step}") as checkpoint:
            for n in range(300):
                checkpoint.save_bytes(f"part-{n}", [b"x" * 790])
    assert place.memory_bytes() <= 600 * 8192
    with nebulaml.Checkpoint("global_step3") as checkpoint:
        for n in range(2000):
            checkpoint.save_bytes(f"part-{n}", [b"%d" % n])
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step3" and found.read_bytes("part-1999") == b"1999" and len(found.files) == 2000


# fault (Memory): Jobs have ended, while the agent works for others.
# result: The newest version of each stays in memory for a restart, for `NEBULA_AGENT_LINGER`. Older ones leave memory
# as soon as they are durable. Versions that storage does not have stay.
@pytest.mark.nightly
def test_runs_that_have_ended_give_their_memory_back_while_others_go_on(place, monkeypatch):
    """Twelve short runs, each with its own path, would otherwise hold two versions each until memory is full."""
    monkeypatch.setenv("NEBULA_AGENT_LINGER", "4")
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")  # the agent has something to do all the time
    with nebulaml.Checkpoint("global_step1") as checkpoint:
        checkpoint.save_bytes("own", [b"x"])
    checkpoint.wait("durable", 60)
    own = place.memory_bytes()
    for run in range(4):
        place.run(
            """
            nm.init(sys.argv[1], 0, 2, on_error="raise")
            for step in (1, 2):
                with nm.Checkpoint(f"global_step{step}") as c:
                    c.save("m.pt", torch.full((1 << 20,), float(step)))
                c.wait("durable", 60)
            """,
            place.root / f"run{run}",
        )
    until(lambda: place.memory_bytes() <= own, 60)
    assert nebulaml.get_latest_checkpoint().read_bytes("own") == b"x" and place.memory_bytes() == own
    found = nebulaml.get_latest_checkpoint(str(place.root / "run3"))
    assert found.tag == "global_step2" and (found.load("m.pt") == 2).all()
