"""No command prints a character of a tag on which a terminal acts, and each answer in JSON has the tag as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess

import nebulaml
import torch
from nebulaml._session import locate

TAGS = ["=1+1", "\x1b[31mred\x1b]0;t\x07", "\u202egpj.exe", "a\r\nb\tc", 'x"} 1\nfake_metric 7', "\u200b\u2028z", "%s%n", "\x9b2J", "-rf", "\x7f\u0645"]
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
OF_ALL = (
    ["list", "--metrics"], ["list", "--json", "--metrics"], ["status"], ["status", "--json"], ["metrics"], ["goodput", "--json"], ["verify", "--json"],
    ["prune", "--keep-last", "1"], ["prune", "--keep-last", "1", "--json"], ["pin"], ["pin", "--json"],
)  # fmt: skip
OF_ONE = (["inspect"], ["inspect", "--json"], ["trace"], ["diff", "--json"], ["flush", "--json"])


def printed(place, command, *words):
    line = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), *command, "--path", str(place.storage), *words]
    done = subprocess.run(line, capture_output=True, timeout=60)
    text = (done.stdout + done.stderr).decode()
    assert not ACTS.search(text), (line, text)
    return done.stdout.decode()


def test_no_output_acts_on_a_terminal_and_json_tells_the_tag(place):
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    for tag in TAGS:
        with nebulaml.Checkpoint(tag, metrics={tag[:9]: 1.0}) as checkpoint:
            checkpoint.save(f"{tag}.pt", {tag: torch.ones(3)})
        checkpoint.wait("durable", 60)
    printed(place, ["pin", "--reason", "r\x1b[31m\u202e"], "--", TAGS[1])
    told = {tuple(command): printed(place, command) for command in OF_ALL}
    for command, text in told.items():
        if "--json" in command:
            json.loads(text)
    listed = json.loads(told["list", "--json", "--metrics"])["versions"]
    assert [one["tag"] for one in listed] == TAGS and [list(one["metrics"]) for one in listed] == [[tag[:9]] for tag in TAGS]
    assert not [line for line in told["metrics",].splitlines() if line.startswith("fake_metric")]
    for tag in TAGS:
        for command in OF_ONE:
            said = printed(place, command, "--", *([TAGS[0]] if command[0] == "diff" else []), tag)
            if command != ["inspect"]:
                json.loads(said)
        assert json.loads(printed(place, ["inspect", "--json"], "--", tag))["tag"] == tag
        inside = json.loads(printed(place, ["inspect", "--tensors", "--json"], "--", tag, f"{tag}.pt"))
        assert [one["name"] for one in inside["tensors"]] == [tag]
    assert not ACTS.search("".join(path.read_text() for path in place.root.rglob("agent.log")))


def test_no_table_in_python_acts_on_a_terminal(place):
    with nebulaml.Manager(place.storage) as manager:
        for step, tag in enumerate(TAGS):
            manager.save(step, {"x": 1}, metrics={tag: 1.0}, metadata={tag: [tag]})
        manager.wait()
        text = repr(manager.checkpoints()) + manager.checkpoints()._repr_html_()
    nebulaml.init(place.root / "other", 0)
    for tag in TAGS:
        with nebulaml.Checkpoint(tag) as checkpoint:
            checkpoint.save(f"{tag}.pt", 1)
        text += checkpoint._repr_html_() + repr(checkpoint)
    text += repr(nebulaml.checkpoints()) + nebulaml.checkpoints()._repr_html_()
    assert not ACTS.search(text) and text.count("\n") == 2 * len(TAGS)
