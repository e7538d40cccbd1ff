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
