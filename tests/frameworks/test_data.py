"""The position in the data is saved with the model: torchdata's StatefulDataLoader and Hugging Face datasets continue with the next sample."""

import pytest
from conftest import interpreter


def job(node, kind, *more, path="persist", **options):
    return node.run(interpreter("torchdata"), "data_job.py", "--kind", kind, "--persist", node.base / path, *more, **options)


# An epoch has 16 steps. A dataset that has loaded a state by itself begins its later epochs there, too, so it gets one.
@pytest.mark.parametrize(("kind", "steps"), [("map", 20), ("stream", 20), ("own", 12)])
def test_the_data_go_on_with_the_next_sample_after_sigkill(node, kind, steps):
    whole = job(node, kind, "--steps", steps, path="whole").losses
    assert len(whole) == steps and whole[1] != whole[2]
    before = job(node, kind, "--kill-at", 6, check=False)
    assert before.losses == {step: whole[step] for step in range(1, 7)}
    again = job(node, kind, "--steps", steps)
    assert again.resumed == 6 and again.losses == {step: whole[step] for step in range(7, steps + 1)}


def test_workers_go_on_after_sigterm_of_another_process(node):
    assert len(job(node, "stream", "--term-at", 3).losses) == 20


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("killed_at", [7, 17, 19], ids=["inside the first epoch", "at the end of the epoch", "inside the second epoch"])
def test_the_documented_loop_has_the_losses_of_an_uninterrupted_run_bit_for_bit(node, workers, killed_at):
    options = ["--workers", workers, "--steps", 24]
    whole = job(node, "loop", *options, path="whole").losses
    assert len(whole) == 24
    job(node, "loop", *options, "--kill-at", killed_at, check=False)
    again = job(node, "loop", *options).losses
    assert again == {step: whole[step] for step in range(min(again), 25)} and killed_at - 2 < min(again) <= killed_at + 1
