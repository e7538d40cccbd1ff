"""The examples of docs/python.md run as they stand there, with another place for what they save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs/python.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)

BEFORE = """
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
steps, epoch, loss, scores = 501, 1, 0.5, [1, 2]
def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
"""
# What an example needs, and what it leaves, by its first line.
AROUND = {
    "import nebulaml as nm": ("", "assert nm.get_latest_checkpoint().step == 500"),
    'good = nm.get_checkpoint("global_step300")': (
        """
nm.init("/scratch/run7")
with nm.Checkpoint("global_step300", 1) as before:
    before.save("state.pt", {"model": {"weight": torch.full((2, 3), 7.0), "bias": torch.zeros(2)}})
""",
        "assert (model.weight == 7).all()",
    ),
    'with nm.Manager("/scratch/run7", save_every_steps=500, save_every_s="15m",': (
        "",
        """
with nm.Manager("/scratch/run7") as again:
    assert again.latest_step() == 500 and again.checkpoint(500).metrics == {"val_loss": 0.5}
""",
    ),
    'evals = nm.Session("/scratch/evals", persistent_time_interval=0)': (
        "",
        """
with nm.Session("/scratch/evals") as again:
    assert again.get_latest_checkpoint().load("scores.pt") == scores
""",
    ),
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.split("\n")[0][:30])
def test_an_example_of_the_guide_runs(place, example):
    first = example.split("\n")[0].partition("  #")[0].rstrip()
    before, after = AROUND[first]
    text = (BEFORE + before + example + after).replace("/scratch", str(place.root / "scratch"))
    assert place.run(text + '\nsay("done")\n').endswith("done\n")
