"""Memory for the first save is made before it, and an optimizer's state is counted before it exists."""

from __future__ import annotations

import json
from pathlib import Path

import nebulaml as nm
import pytest
import torch
from nebulaml import _nebula
from nebulaml._session import engine
from nebulaml.tensors import preparing
from waiting import until

FLOATS = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()


def memory_used():
    return json.loads(engine.session().report(_nebula.REPORT_STATUS, None))["agent"]["memory_used"]


def settled(least):
    until(lambda: memory_used() >= least, 60)
    return memory_used()


def test_the_first_saves_take_the_images_that_were_made_for_them(place):
    nm.init(place.storage, 0, 2)
    state = {"w": torch.ones(FLOATS)}
    nm.prepare(state)
    made = settled(2 * 4 * FLOATS)
    for step in (1, 2):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        checkpoint.save("model.pt", state)
        if step == 1:
            assert memory_used() == made
        # From the first commit on, the agent makes a third image for the version after these two.
        assert memory_used() in (made, made + made // 2)
        checkpoint.commit()
        checkpoint.wait("captured", 60)
    assert (nm.get_latest_checkpoint().load("model.pt")["w"] == 1).all()


def test_the_thread_that_logs_is_started_before_the_first_save(place):
    """It keeps the interpreter's lock when it starts, for up to 5 ms."""
    nm.init(place.storage, 0, 2)
    nm.prepare({"w": torch.ones(FLOATS)})
    started = engine.default.watcher
    assert started.is_alive()
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.ones(FLOATS)})
    assert engine.default.watcher is started


RESUMES = """
    import json
    from nebulaml import _nebula
    from nebulaml._session import engine

    def used():
        return json.loads(engine.session().report(_nebula.REPORT_STATUS, None))["agent"]["memory_used"]

    nm.init(sys.argv[1], 0, on_error="raise")
    least, floats = map(int, sys.argv[2:])
    found = nm.get_latest_checkpoint()
    step = found.step + 1 if found else 1
    deadline = time.monotonic() + 60
    while used() < least and time.monotonic() < deadline:
        time.sleep(0.01)
    before = used()
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.ones(floats)})
        taken = used()
        checkpoint.save("small.pt", 1)
    checkpoint.wait("durable", 60)
    say(step, before, taken)
"""


@pytest.mark.nightly
def test_a_resume_from_storage_has_the_memory_of_the_first_save_made_before_it(place, monkeypatch):
    """For files of the sizes that the newest checkpoint has. Saves of other sizes get memory of their own, and that memory goes."""

    def resumed(least, floats):
        step, before, taken = map(int, place.run(RESUMES, place.storage, least, floats).split())
        place.lose_memory()
        return step, before, taken

    size = 4 * FLOATS
    assert resumed(0, FLOATS)[:2] == (1, 0)
    step, before, taken = resumed(size, FLOATS)
    assert step == 2 and size <= before <= size * 17 // 16 + (2 << 20) and taken == before
    step, before, taken = resumed(size, 2 * FLOATS)
    assert step == 3 and size <= before <= size * 17 // 16 + (2 << 20) and taken >= before + 2 * size
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "6M")  # the file of 8 MiB is not foreseen, and a small one finds room
    assert resumed(0, 1000)[:2] == (4, 0)


def test_a_manager_prepares_for_each_item_and_for_state_that_does_not_exist_yet(place):
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with nm.Manager(place.storage, save_every_steps=1) as manager:
        manager.prepare({"model": model, "optimizer": optimizer})
        made = settled(3 * 4 * FLOATS)
        assert not optimizer.state
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        manager.save(1, {"model": model, "optimizer": optimizer}).wait("captured", 60)
        assert memory_used() <= made + (1 << 20)  # the metadata's small file
        manager.wait()


def test_a_restore_prepares_for_its_targets_whether_there_is_a_checkpoint_or_not(place, monkeypatch):
    asked, prepare = [], preparing.prepare

    def note(owner, state, item):
        asked.append((type(item), sum(tensor.nbytes for tensor in state)))
        prepare(owner, state, item)

    monkeypatch.setattr(preparing, "prepare", note)
    for found in (False, True):
        model = torch.nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        with nm.Manager(place.storage, save_every_steps=1) as manager:
            assert (manager.restore({"model": model, "optimizer": optimizer}) is not None) == found
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            if not found:
                settled(3 * 4 * FLOATS)
            manager.save(1 + found, {"model": model, "optimizer": optimizer})
            manager.wait()
    state = 2 * 4 * FLOATS + 4  # two moments, and the count of steps
    assert asked == [(torch.nn.Linear, 4 * FLOATS), (torch.optim.AdamW, 0), (torch.nn.Linear, 4 * FLOATS), (torch.optim.AdamW, state)]


def stepped(parameters: int) -> torch.optim.Optimizer:
    model = torch.nn.Linear(parameters >> 10, 1 << 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, parameters >> 10)).sum().backward()
    optimizer.step()
    return optimizer


def test_the_first_step_of_an_optimizer_prepares_for_its_parameters_and_its_state(place, monkeypatch):
    asked, prepare = [], preparing.prepare
    monkeypatch.setattr(preparing, "prepare", lambda *given: (asked.append(given), prepare(*given)))
    nm.init(place.storage, 0, 2)
    stepped(FLOATS)
    settled(2 * 3 * 4 * FLOATS)
    stepped(FLOATS)  # another optimizer
    assert len(asked) == 2


def test_nothing_is_prepared_after_a_save_or_without_a_session(place, monkeypatch):
    asked = []
    monkeypatch.setattr(preparing, "prepare", lambda *arguments: asked.append(arguments))
    stepped(1 << 12)
    nm.init(place.storage, 0, 2)
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.ones(16)})
    stepped(1 << 12)
    assert not asked


def test_a_step_goes_on_if_no_memory_can_be_prepared(place, monkeypatch):
    def refuse(*_arguments):
        raise nm.NebulaUnavailable("no agent")

    monkeypatch.setattr(preparing, "prepare", refuse)
    nm.init(place.storage, 0, 2, on_error="raise")
    assert stepped(1 << 12).state


@pytest.mark.skipif("[madvise]" not in HUGE_PAGES, reason="the machine decides about huge pages by itself")
def test_the_small_pages_at_the_ends_of_tensors_are_joined_before_the_first_save(place):
    """Otherwise the first save takes longer to protect them than all other pages."""
    code = """
    def huge_kib(): return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHuge"))
    state = {str(i): torch.ones(4 << 20) for i in range(4)}  # 16 MiB each, next to each other
    before = huge_kib()
    nm.init(sys.argv[1], 0, 2)
    nm.prepare(state)
    until = time.monotonic() + 30
    while huge_kib() < 62 << 10 and time.monotonic() < until:
        time.sleep(0.01)
    say(before, huge_kib())
    """
    before, after = map(int, place.run(code, place.storage).split())
    assert before < 62 << 10 <= after  # the last block of 2 MiB may reach beyond the memory


def test_preparing_again_and_saving_something_else_loses_nothing(place):
    nm.init(place.storage, 0, 2, on_error="raise")
    for _ in range(100):
        nm.prepare({"w": torch.ones(FLOATS)})
    large = {"w": torch.full((3 * FLOATS,), 2.0)}
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", large)
    nm.flush_persistence()
    assert (nm.get_latest_checkpoint().load("model.pt")["w"] == 2).all()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"foreach": False}),
        ("AdamW", {"foreach": True}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adagrad", {}),
        ("NAdam", {}),
    ],
)
def test_the_state_of_an_optimizer_is_counted_as_its_first_step_makes_it(kind, settings):
    model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 5))
    model[0].bias.requires_grad = False
    optimizer = getattr(torch.optim, kind)((each for each in model.parameters() if each.requires_grad), **settings)
    stepped = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
    before = [parameter.clone() for parameter in model.parameters()]
    foretold = preparing.state_to_come(optimizer) if not optimizer.state else None  # Adagrad makes its state at once
    assert not stepped and all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = [
        each.nbytes for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)
    ]
    assert foretold is None or sorted(foretold) == sorted(found)
    assert preparing.state_to_come(optimizer) == []


def test_the_state_of_other_optimizers_is_not_counted():
    model = torch.nn.Linear(2, 2)

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError("a step of the program's own")

    assert preparing.state_to_come(Own(model.parameters(), lr=1)) == []
    assert preparing.state_to_come(torch.optim.LBFGS(model.parameters())) == []
    assert preparing.state_to_come(torch.optim.Adafactor(model.parameters())) == []  # its step looks at values
    assert preparing.state_to_come(model) == []


def test_what_cannot_be_saved_is_refused_before_training_as_it_would_be_at_the_save(place):
    nm.init(place.storage, 0, 2)
    with pytest.raises(nm.NebulaPicklingError, match=r"object\['a'\]\.callback: an object of type builtins\.function cannot be pickled"):
        nm.prepare({"a": Odd(callback=lambda: 0)})
    with nm.Manager(place.root / "other") as manager, pytest.raises(nm.NebulaPicklingError, match="cannot be pickled"):
        manager.prepare({"extra": lambda: 0})


class Odd:
    def __init__(self, **attributes):
        vars(self).update(attributes)
