"""keep_items: old versions lose some of their files, and stay the versions that they were."""

from __future__ import annotations

import os
import subprocess

import nebulaml as nm
import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaConfigError, NebulaNotFound
from waiting import until


def items(step: int) -> dict:
    return {"model": {"w": torch.full((1000,), float(step))}, "optimizer": {"m": torch.full((2000,), float(step))}}


def optimizers(place) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("global_step")) for path in place.storage.glob("global_step*/optimizer.pt"))


def save(manager, steps) -> None:
    for step in steps:
        manager.save(step, items(step))
    manager.wait()


def test_older_versions_keep_their_weights_alone(place):
    with nm.Manager(place.storage, keep_items={"optimizer": 2}) as manager:
        save(manager, range(1, 6))
        until(lambda: optimizers(place) == [4, 5], 60, "two optimizers stay")
        assert manager.all_steps() == [1, 2, 3, 4, 5] and manager.latest_step() == 5
    place.lose_memory()
    with nm.Manager(place.storage, keep_items={"optimizer": 2}) as manager:
        into = {"model": {"w": torch.zeros(1000)}}
        for step in range(1, 6):
            assert manager.restore(into, step=step).step == step and into["model"]["w"][0] == step
        both = {**into, "optimizer": {"m": torch.zeros(2000)}}
        with pytest.raises(NebulaNotFound, match="no item 'optimizer' any more: keep_items"):
            manager.restore(both, step=2)
        assert manager.restore(both, step=2, strict=False).step == 2 and into["model"]["w"][0] == 2 and not both["optimizer"]["m"].any()
        assert manager.restore(both).step == 5 and both["optimizer"]["m"][0] == 5
        with pytest.raises(NebulaNotFound, match="optimizer"):
            manager.checkpoint(2).load("optimizer.pt")
        save(manager, [6])
        until(lambda: optimizers(place) == [5, 6], 60, "two optimizers stay")
        assert manager.checkpoint(4).load("model.pt")["w"][0] == 4
    assert subprocess.run([os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "verify", "--all", "--path", str(place.storage)], capture_output=True, check=True)


def test_rules_for_versions_and_for_items_work_together_and_pins_stay_whole(place):
    with nm.Manager(place.storage, keep_last=4, keep_items={"optimizer": 1}) as manager:
        manager.save(1, items(1))
        manager.wait()
        manager.pin(1)
        save(manager, range(2, 9))
        until(lambda: optimizers(place) == [1, 8] and manager.all_steps() == [1, 5, 6, 7, 8], 60, f"{optimizers(place)} {manager.all_steps()}")


def test_a_tag_that_is_saved_again_has_all_its_files_again(place):
    with nm.Manager(place.storage, keep_items={"optimizer": 1}) as manager:
        save(manager, [1, 2, 3])
        until(lambda: optimizers(place) == [3], 60, "one optimizer stays")
        into = items(0)
        manager.restore({"model": into["model"]}, step=1)
        save(manager, [2])  # goes on from step 1
        assert manager.latest_step() == 2 and manager.restore(into).step == 2 and into["optimizer"]["m"][0] == 2


def test_patterns_of_init_name_files_of_frameworks(nm, place):  # noqa: F811
    nm.init(keep_items={"*optim_states.pt": 1})
    for step in (1, 2, 3):
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("mp_rank_00_model_states.pt", torch.ones(5))
            checkpoint.save("zero_pp_rank_0_mp_rank_00_optim_states.pt", torch.ones(5))
        checkpoint.wait("durable", 60)
    until(lambda: len(list(place.storage.glob("*/*optim_states.pt"))) == 1, 60, "one optimizer stays")
    assert len(list(place.storage.glob("*/*model_states.pt"))) == 3
    nm.init(keep_items={})
    with nm.Checkpoint("global_step4") as checkpoint:
        checkpoint.save("zero_pp_rank_0_mp_rank_00_optim_states.pt", torch.ones(5))
    checkpoint.wait("durable", 60)
    nm.flush_persistence()
    assert len(list(place.storage.glob("*/*optim_states.pt"))) == 2


def test_prune_thins_what_no_rule_keeps(place):
    with nm.Manager(place.storage) as manager:
        save(manager, [1, 2, 3, 4])
    prune = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "prune", "--path", str(place.storage), "--keep-last", "2", "--thin", "optimizer*"]
    said = subprocess.run(prune, capture_output=True, text=True, check=True).stdout
    assert "would be thinned" in said and optimizers(place) == [1, 2, 3, 4]
    said = subprocess.run([*prune, "--yes"], capture_output=True, text=True, check=True).stdout
    assert said.count("thinned") == 2 and "from 2 of 4 checkpoints" in said and optimizers(place) == [3, 4]
    assert "nothing to remove" in subprocess.run([*prune, "--yes"], capture_output=True, text=True, check=True).stdout
    with nm.Manager(place.storage) as manager:
        assert manager.all_steps() == [1, 2, 3, 4] and manager.checkpoint(1).load("model.pt")["w"][0] == 1


@pytest.mark.parametrize("wrong", [5, {"optimizer": 0}, {"optimizer": True}, {"a,b": 1}, {"a=b": 1}, {"": 1}, {1: 1}, {"x" * 200: 1}])
def test_rules_that_mean_nothing_are_refused(place, wrong):
    with pytest.raises(NebulaConfigError, match="keep_items"):
        nm.init(str(place.storage), keep_items=wrong)
    with pytest.raises(NebulaConfigError, match="keep_items"):
        nm.Manager(place.storage, keep_items=wrong)
