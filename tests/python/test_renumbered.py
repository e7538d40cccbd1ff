"""A version whose number changes after a program has found it: it was committed before the agent could read storage."""

from __future__ import annotations

import os
import threading

import fork_server
import nebulaml as nm
import pytest
import torch
from nebulaml._session import locate
from waiting import until

OTHER = """
import sys, torch, nebulaml as nm
nm.init(sys.argv[1], 0)
with nm.Checkpoint("other1") as checkpoint:
    checkpoint.save("model.pt", {"value": torch.zeros(4)})
checkpoint.wait("durable", 60)
nm._shutdown()
"""


# fault (Deaths): The agent is killed after a version that a program has found got another number, because storage had later ones.
# result: The program's handle finds the version again.
def test_a_handle_finds_its_version_again_under_its_new_number(place, monkeypatch):
    begun, gate, program = place.root / "begun", place.root / "gate", place.root / "nebula"
    program.write_text(f"#!/bin/sh\ntouch {begun}\nwhile [ ! -e {gate} ]; do sleep 0.01; done\nexec {locate.agent_path()} \"$@\"\n")
    program.chmod(0o700)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(program))
    starting = threading.Thread(target=lambda: nm.init(str(place.storage), 0, 2))
    starting.start()
    until(begun.exists, what="the start of the agent, after the program has looked at the path")
    place.storage.write_text("no directory yet")
    gate.touch()
    starting.join(60)
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"value": torch.arange(4)})
    checkpoint.wait("committed", 60)
    found = nm.get_latest_checkpoint()
    assert found.tag == "global_step1"
    elsewhere = place.root / "elsewhere"
    environment = os.environ | {"NEBULA_RUNTIME_DIR": str(place.root / "other"), "NEBULA_MEMORY_DIR": str(place.root / "memory"), "NEBULA_AGENT_LINGER": "0"}
    assert fork_server.start(OTHER, elsewhere, env=environment).wait(120) == 0
    place.storage.unlink()
    elsewhere.rename(place.storage)
    nm.flush_persistence(timeout=60)
    rows = nm.list_checkpoints()
    assert rows["global_step1"]["sequence"] > rows["other1"]["sequence"]  # although it was committed before
    place.kill_agent()
    assert torch.equal(found.load("model.pt")["value"], torch.arange(4))


def save_last(first: int) -> None:
    with nm.Checkpoint("last") as checkpoint:
        checkpoint.save("model.pt", {"value": torch.arange(4) + first})
    checkpoint.wait("committed", 60)


def remove_images(place) -> None:
    for image in place.memory.glob("*.img"):
        image.unlink()


# fault (Deaths): The agent dies together with its memory, and the next one counts the writings of a tag from one again.
# result: A handle of the version that is lost fails. It does not load the later one.
def test_a_handle_loads_no_later_writing_of_its_tag_after_the_agents_memory_was_lost(place):
    nm.init(str(place.storage), 3600, 2)
    with nm.Checkpoint("first") as first:  # the first version alone goes to storage by itself, from where a handle would load it
        first.save("model.pt", {"value": torch.zeros(4)})
    first.wait("durable", 60)
    save_last(0)
    found = nm.get_latest_checkpoint()
    remove_images(place)  # before the agent dies: a thread of this process may start the next one at once, and that adopts all images
    place.kill_agent()
    save_last(100)
    with pytest.raises(nm.NebulaError):
        found.load("model.pt")
    assert torch.equal(nm.get_latest_checkpoint().load("model.pt")["value"], torch.arange(4) + 100)


# fault (Deaths): The agent dies, the next one adopts its memory, and the program writes the tag again.
# result: A handle of the earlier version loads that one.
def test_a_handle_loads_its_own_writing_of_a_tag_that_the_next_agent_has_adopted(place):
    nm.init(str(place.storage), 3600, 2)
    save_last(0)
    found = nm.get_latest_checkpoint()
    place.kill_agent()
    assert list(nm.list_checkpoints()) == ["last"]  # the next agent has adopted the images
    remove_images(place)
    save_last(100)
    assert torch.equal(found.load("model.pt")["value"], torch.arange(4))
    assert torch.equal(nm.get_latest_checkpoint().load("model.pt")["value"], torch.arange(4) + 100)
