"""nm.log_to: a tool gets each durable version once, at whatever moment the program ends."""

import json

JOB = """
from nebulaml.monitor import trackers

class Tool:
    versions = []
    def __init__(self, options): pass
    def scalars(self, step, values): pass
    def version(self, step, values, facts): self.versions.append([facts["tag"], step, facts["state"], facts["size_bytes"] > 4000, values["nebula/size_bytes"] > 4000])
    def rewind(self, step, rows, origin): pass
    def close(self): self.versions.append("closed")

def save(tag):
    with nm.Checkpoint(tag) as checkpoint:
        checkpoint.save("model.pt", torch.zeros(1000))
    checkpoint.wait("durable", timeout=60)

trackers._TOOLS["tensorboard"] = Tool
nm.init(sys.argv[1], 0)
save("global_step1")
time.sleep(0.01)
tracker = nm.log_to("tensorboard")
if sys.argv[2] == "deaf":  # the thread that listens comes to nothing before the end
    tracker._session._engine.listeners.clear()
if sys.argv[2] == "late":  # the event of a version that became durable before
    tracker._hear(nm.Event("durable", "global_step1", 1))
save("global_step2")
save("other")
if sys.argv[2] == "heard":
    until = time.monotonic() + 30
    while len(tracker._events) < 2 and time.monotonic() < until:
        time.sleep(0.01)
tracker.close()
import json
say(json.dumps(Tool.versions))
"""


def test_close_logs_versions_that_became_durable_just_before_and_each_once(place):
    for listening in ("deaf", "heard", "at once", "late"):
        told = json.loads(place.run(JOB, place.root / listening, listening))
        assert told == [["global_step2", 2, "durable", True, True], ["other", 0, "durable", True, True], "closed"], listening
