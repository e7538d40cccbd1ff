"""load_into changes tensors in place, or refuses and changes nothing."""

from __future__ import annotations

import pytest
import torch
from same import assert_same


@pytest.fixture
def saved(nm):
    torch.manual_seed(1)
    state = {"w": torch.randn(4, 3), "blocks": [{"b": torch.arange(5)}, (torch.ones(2), "fixed")], "step": 7}
    checkpoint = nm.Checkpoint("into")
    checkpoint.save("s.pt", state)
    checkpoint.commit()
    return checkpoint, state


def empty():
    blocks = [{"b": torch.zeros(5, dtype=torch.long)}, (torch.zeros(2), "fixed")]
    return {"w": torch.zeros(4, 3), "blocks": blocks, "step": 0}


def test_values_go_into_the_tensors_that_are_there(saved):
    checkpoint, state = saved
    target = empty()
    weights, inner = target["w"], target["blocks"][1][0]
    assert checkpoint.load_into("s.pt", target) is target
    assert target["w"] is weights and target["blocks"][1][0] is inner
    assert_same(state, target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("w"), r"\['w'\] is in the checkpoint only"),
        (lambda t: t.update(new=torch.ones(1)), r"\['new'\] is missing in the checkpoint"),
        (lambda t: t.update(w=torch.zeros(3, 4)), r"shape \(3, 4\) expected, the checkpoint has \(4, 3\)"),
        (lambda t: t.update(w=torch.zeros(4, 3, dtype=torch.float64)), r"torch.float64 expected"),
        (lambda t: t["blocks"].append(1), r"3 elements expected, the checkpoint has 2"),
        (lambda t: t.update(blocks={}), r"dict expected, the checkpoint has list"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(saved, change, words):
    checkpoint, _ = saved
    target = empty()
    change(target)
    with pytest.raises(ValueError, match=words):
        checkpoint.load_into("s.pt", target)
    assert target["blocks"] == {} or not target["blocks"][0]["b"].any()
    assert target["step"] == 0


def test_a_module_is_loaded_in_place(nm):
    source, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    checkpoint = nm.Checkpoint("module")
    checkpoint.save("m.pt", source.state_dict())
    checkpoint.commit()
    weight = target.weight
    checkpoint.load_into("m.pt", target)
    assert target.weight is weight and torch.equal(weight, source.weight)
