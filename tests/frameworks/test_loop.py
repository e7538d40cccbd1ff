"""Plain PyTorch: the loop that the README shows, killed and resumed."""

import random
import sys

import nebulaml as nm
import numpy
import pytest
import torch


@pytest.mark.parametrize(("ranks", "more"), [(1, []), pytest.param(2, ["--ddp"], marks=pytest.mark.nightly("test_the_loop_of_the_readme_resumes_bit_for_bit_after_sigkill"))])
def test_the_loop_of_the_readme_resumes_bit_for_bit_after_sigkill(node, ranks, more):
    def job(persist, *options, **settings):
        return node.run(sys.executable, "loop_job.py", "--persist", persist, *more, *options, ranks=ranks, **settings)

    whole = job(node.base / "whole").losses
    killed = job(node.persist, "--kill-at", 230, check=False)
    assert max(killed.losses) == 230
    again = job(node.persist).losses
    assert again == {step: loss for step, loss in whole.items() if step > 200}


def draw():
    return torch.rand(3).tolist(), random.random(), numpy.random.rand(), numpy.random.randn()


def test_rng_state_brings_back_every_generator_and_needs_no_code_to_load(tmp_path):
    numpy.random.randn()  # leaves a second value waiting inside the generator
    state = nm.rng_state()
    torch.save(state, tmp_path / "rng.pt")
    first, other = draw(), draw()
    assert first != other
    nm.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == first


def test_rng_state_of_something_else_is_refused():
    with pytest.raises(nm.NebulaConfigError, match="rng_state"):
        nm.set_rng_state(torch.get_rng_state())
