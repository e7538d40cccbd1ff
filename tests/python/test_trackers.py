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


ONLINE = """
import types
used, logged = [], []

class Artifact:
    def __init__(self, name, type, metadata):
        self.name, self.metadata, self.references = name, metadata, []
    def add_reference(self, uri, name, checksum):
        self.references.append(uri)

class Run:
    id, step, offline, config = "any", 0, False, types.SimpleNamespace(update=lambda values, allow_val_change: said.append(values))
    def define_metric(self, *names, **more): pass
    def log(self, values, step=None): pass
    def log_artifact(self, artifact, aliases): logged.append([artifact.name, aliases, artifact.metadata["tag"]])
    def use_artifact(self, artifact): used.append([artifact.name, artifact.references, artifact.metadata["tag"]])
    def finish(self): pass

said = []
sys.modules["wandb"] = types.SimpleNamespace(run=None, init=lambda **options: Run(), Artifact=Artifact)
nm.init(sys.argv[1], 0)
tracker = nm.log_to("wandb", project="p")
if len(sys.argv) > 2:
    tracker.rewind(7)
    tracker.rewind(int(sys.argv[2]))
tracker.log(int(sys.argv[2]) + 1 if len(sys.argv) > 2 else 1, loss=0.5)
with nm.Checkpoint("a/best" if len(sys.argv) > 2 else "global_step1") as checkpoint:
    checkpoint.save("model.pt", torch.zeros(1000))
checkpoint.wait("durable", timeout=60)
tracker.close()
say(json.dumps([used, logged, said]))
"""


def test_a_run_of_wandb_that_is_online_uses_the_version_from_which_it_resumed_in_the_collection_of_its_path(place):
    code = "import json\n" + ONLINE
    used, logged, _ = json.loads(place.run(code, place.storage))
    ((collection, aliases, tag),) = logged
    assert used == [] and collection.startswith("checkpoints-storage-") and aliases == ["latest", "global_step1"] and tag == "global_step1"
    used, logged, said = json.loads(place.run(code, place.storage, 1))
    assert used == [[collection, [f"file://{place.storage}/global_step1"], "global_step1"]]
    assert said == [{"nebula_resumed_from": {"tag": "global_step1", "step": 1, "path": f"{place.storage}/global_step1"}}], "there is no step 7"
    assert [(name, aliases) for name, aliases, _ in logged] == [(collection, ["latest", "a-best"])]


ROWS = """
import json, types

class Run:
    step, rows = int(sys.argv[2]), {}
    def define_metric(self, *names, **more): pass
    def log(self, values, step=None):  # W&B takes no step before its own, and a call without a step ends the row
        assert step is None or step >= Run.step, (step, Run.step)
        Run.step = Run.step if step is None else step
        Run.rows.setdefault(Run.step, []).append(values)
        Run.step += step is None
    def log_artifact(self, artifact, aliases): pass
    def finish(self): pass

sys.modules["wandb"] = types.SimpleNamespace(run=None, init=lambda **options: Run(), Artifact=lambda *names, **more: types.SimpleNamespace(add_reference=lambda *names, **more: None))
nm.init(sys.argv[1], 0)
tracker = nm.log_to("wandb", project="p")
tracker.log(4, loss=0.5)
for tag in ("global_step4", "best"):
    with nm.Checkpoint(tag) as checkpoint:
        checkpoint.save("model.pt", torch.zeros(1000))
    checkpoint.wait("durable", timeout=60)
until = time.monotonic() + 60
while len(tracker._events) < 2 and time.monotonic() < until:
    time.sleep(0.01)
tracker.log(4, accuracy=0.25, loss=0.75)
tracker.log(5, loss=0.125)
tracker.log(4, late=1)
tracker.close()
say(json.dumps({step: [sorted(set(row) - {"nebula/blocked_ms", "nebula/copy_ms", "nebula/persist_seconds"}) for row in rows] for step, rows in Run.rows.items()}))
"""


def test_wandb_gets_all_values_of_a_step_by_several_calls_and_versions_take_no_step_its_row(place):
    version = ["nebula/size_bytes", "nebula/step"]
    assert json.loads(place.run(ROWS, place.storage, 0)) == {"4": [["loss"], ["accuracy"], version], "5": [["loss"], version]}
    assert json.loads(place.run(ROWS, place.storage, 5)) == {"5": [["loss"], version], "6": [version]}, "an earlier process has logged step 4"
