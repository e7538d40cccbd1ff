"""`nebula trace`: a file that Perfetto reads, by the rules of the Trace Event Format."""

import json
import time

HOSTILE = "ev/il\033[31m<b>\u202e"


def check_format(document):
    """Checks the rules for the kinds of event that are used: complete (X), instant (i) and metadata (M)."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"} and document["displayTimeUnit"] in (
        "ms",
        "ns",
    )
    before, named = 0, set()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            named.add((event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else None))
            continue
        assert event["ts"] == int(event["ts"]) >= before and isinstance(event["cat"], str)
        before = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] == int(event["dur"]) >= 0 and isinstance(event["args"], dict)
        else:
            assert event["ph"] == "i" and event["s"] in "gpt"
    for event in document["traceEvents"]:
        assert ("process_name", event["pid"], None) in named
    pieces = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for event in pieces:
        assert ("thread_name", event["pid"], event["tid"]) in named
        for other in pieces:  # pieces of a thread lie beside or inside each other, or the viewers draw them wrong
            if (
                other is event
                or (other["pid"], other["tid"]) != (event["pid"], event["tid"])
                or other["ts"] < event["ts"]
            ):
                continue
            ends = event["ts"] + event["dur"], other["ts"] + other["dur"]
            assert other["ts"] >= ends[0] or ends[1] <= ends[0]


def test_a_version_of_two_nodes_is_a_trace_with_each_rank(run, make, storage, tmp_path):
    make(HOSTILE, "--rank", "3", "model.pt=5000")
    store = make(HOSTILE, "--writing", "2", "--rank", "0", "optim.pt=300")
    assert run("copy", store, storage).returncode == 0
    told = run("trace", HOSTILE, "--path", storage)
    document = json.loads(told.stdout)
    check_format(document)
    assert document["otherData"]["tag"] == HOSTILE
    pieces = {
        (event["name"], event["tid"]): event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"]
    }
    assert set(pieces) == {(name, rank) for name in ("copy to memory", "write to storage") for rank in (0, 3)}
    assert pieces["copy to memory", 3]["dur"] == 12000 and list(pieces["copy to memory", 3]["args"]["files"]) == [
        "model.pt"
    ]
    assert abs(pieces["copy to memory", 0]["ts"] / 1e6 - time.time()) < 600
    assert len({pieces["copy to memory", rank]["pid"] for rank in (0, 3)}) == 2
    life = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    assert len(life) == 1 and all(
        life[0]["ts"] <= one["ts"] and one["ts"] + one["dur"] <= life[0]["ts"] + life[0]["dur"]
        for one in pieces.values()
    )
    written = run("trace", "latest", "--path", storage, "--out", "trace.json")
    assert written.returncode == 0 and "\033" not in written.stdout and "2 ranks" in written.stdout
    assert json.loads((tmp_path / "trace.json").read_text()) == document


def test_a_trace_that_cannot_be_made_is_one_sentence(run, make):
    store = make("t", "m.pt=3")
    for arguments, code in ((["no such tag"], 3), (["t", "--out", "absent/trace.json"], 3)):
        failed = run("trace", *arguments, "--path", store)
        assert failed.returncode == code and failed.stderr.count("\n") == 1 and failed.stdout == ""
