"""The protocol of write-once storage holds if any process sleeps at any step, and each of its conditions is needed."""

import os

import pytest
from storage_model import Rules, explore

# Writers, removers. Lost answers multiply the states, so only the long run explores the larger two with them.
SIZES = [(2, 0, True), (1, 1, True), (1, 2, False), (2, 1, False)]
if os.environ.get("NEBULA_TEST_NIGHTLY"):
    SIZES += [(1, 2, True), (2, 1, True)]


@pytest.mark.parametrize("related", [True, False], ids=["a run after another", "two runs by mistake"])
@pytest.mark.parametrize(("writers", "removers", "lost"), SIZES)
def test_a_durable_version_stays_whole_and_newest_in_every_reachable_state(writers, removers, lost, related):
    rules = Rules(answers_get_lost=lost)
    seen, problem, path = explore(rules, related=related, writers=writers, removers=removers)
    assert problem is None, "\n".join([problem or "", *path])
    assert seen > 40, "the model explores next to nothing"


@pytest.mark.parametrize(
    ("rule", "writers", "removers"),
    [
        ("create_if_free", 2, 0),
        ("put_if_free", 2, 0),
        ("gives_way", 2, 0),
        ("removal_is_entered", 1, 1),
        ("again_after_removal", 1, 1),
        ("last_look", 1, 1),
        ("remove_if_seen", 1, 1),
        ("numbers_go_on", 1, 2),
        ("log_before_number", 1, 2),
    ],
)
def test_dropping_a_condition_is_found(rule, writers, removers):
    rules = Rules(**{rule: False}, answers_get_lost=False)
    _, problem, path = explore(rules, writers=writers, removers=removers)
    assert problem is not None and path, "the explorer cannot see this mistake"
