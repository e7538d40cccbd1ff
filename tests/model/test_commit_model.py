"""The protocol holds in every reachable state, and each rule is needed: without it the explorer finds the failure."""

import announce_model
import pytest
import runs_model
from commit_model import CRASHES, Rules, explore


@pytest.mark.parametrize("crashes", [1, pytest.param(CRASHES, marks=pytest.mark.nightly)])
def test_every_promise_holds_in_every_reachable_state(crashes):
    seen, problem, path = explore(Rules(crashes=crashes))
    assert problem is None, "\n".join([problem or "", *path])
    assert seen > 1_000, "the model explores next to nothing"


@pytest.mark.parametrize(
    "rules",
    [
        Rules(manifest_after_records=False),
        Rules(same_run=False),
        Rules(record_after_file=False, digests=False),
        pytest.param(Rules(digests=False), marks=pytest.mark.nightly),
    ],
    ids=["manifest before records", "records of any run", "record before file", "no digests"],
)
def test_breaking_a_rule_is_found(rules):
    _, problem, path = explore(rules)
    assert problem is not None and path, "the explorer cannot see this mistake"


def test_every_promise_of_the_documents_between_nodes_holds_in_every_reachable_state():
    seen, problem, path = announce_model.explore(announce_model.Rules())
    assert problem is None, "\n".join([problem or "", *path])
    assert seen > 1_000, "the model explores next to nothing"


@pytest.mark.parametrize(
    "rule", ["announce_captured", "same_run", "decide_once", "write_once", "tell_wanted", "by_document", "give_up"]
)
def test_breaking_a_rule_of_the_documents_between_nodes_is_found(rule):
    _, problem, path = announce_model.explore(announce_model.Rules(**{rule: False}))
    assert problem is not None and path, "the explorer cannot see this mistake"


@pytest.mark.parametrize("after", [False, True], ids=["two jobs at once", "a job that is started again"])
def test_a_durable_version_stays_or_is_replaced_by_a_later_run_in_every_reachable_state(after):
    seen, problem, path = runs_model.explore(runs_model.Rules(), after)
    assert problem is None, "\n".join([problem or "", *path])
    assert seen > 50, "the model explores next to nothing"


@pytest.mark.parametrize("after", [False, True], ids=["two jobs at once", "a job that is started again"])
@pytest.mark.parametrize("rule", ["give_way", "look_again", "own_record"])
def test_breaking_a_rule_of_runs_that_write_one_tag_is_found(rule, after):
    _, problem, path = runs_model.explore(runs_model.Rules(**{rule: False}), after)
    assert problem is not None and path, "the explorer cannot see this mistake"
