"""Each sample of an epoch comes once and in the same order, for any number of ranks and any number of changes."""

import collections
import itertools

import nebulaml as nm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nebulaml.elastic.sampler import order


def shares(n, world, epoch=0, start=0, **more):
    return [list(nm.ElasticSampler(n, rank=rank, world_size=world, **more).batches(epoch, start)) for rank in range(world)]


def steps(n, world, **more):
    """Returns the samples of all ranks for each global step, in order."""
    return [list(itertools.chain(*parts)) for parts in zip(*shares(n, world, **more), strict=True)]


few = settings(max_examples=40, deadline=None)


@few
@given(n=st.integers(0, 300), batch=st.integers(1, 40), world=st.integers(1, 9), epoch=st.integers(0, 5), seed=st.integers(0, 2**62))
def test_every_world_takes_the_same_samples_at_each_step_and_each_once(n, batch, world, epoch, seed):
    alone = steps(n, 1, global_batch=batch, epoch=epoch, seed=seed)
    assert steps(n, world, global_batch=batch, epoch=epoch, seed=seed) == alone
    assert sorted(itertools.chain(*alone)) == list(range(n))
    assert all(len(step) == batch for step in alone[:-1])
    for mine in zip(*shares(n, world, global_batch=batch, epoch=epoch, seed=seed), strict=True):
        assert max(map(len, mine)) - min(map(len, mine)) <= 1


@few
@given(worlds=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=12), batch=st.integers(1, 30))
def test_a_job_that_changes_its_world_takes_each_sample_once(worlds, batch):
    n, done, taken = 211, 0, []
    for world, count in [*worlds, (2, n)]:
        now = steps(n, world, global_batch=batch, seed=5, start=done)[:count]
        taken, done = taken + now, done + len(now)
    assert taken == steps(n, 1, global_batch=batch, seed=5)


def test_torchs_generator_is_neither_asked_nor_changed():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = steps(1000, 3, global_batch=64, seed=9)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert steps(1000, 3, global_batch=64, seed=9) == first


def test_the_order_is_written_down_for_ever():
    """Checkpoints of other versions of Nebula and torch depend on this order."""
    assert order(range(12), 12, 7, 3) == [5, 2, 1, 3, 4, 11, 10, 9, 7, 0, 6, 8]
    assert order([0, 1, 10**12 - 1], 10**12, 7, 3) == [304997066947, 61211129390, 273974275161]


def test_seeds_and_epochs_have_orders_of_their_own_and_no_order_is_plain():
    orders = {tuple(order(range(50), 50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100 and tuple(range(50)) not in orders
    assert steps(50, 2, global_batch=7, shuffle=False) == [list(range(first, min(first + 7, 50))) for first in range(0, 50, 7)]


@pytest.mark.parametrize("n", [10, *(pytest.param(n, marks=pytest.mark.nightly("test_every_sample_comes_at_every_place_equally_often")) for n in (3, 37))])
def test_every_sample_comes_at_every_place_equally_often(n):
    """Chi-squared over 1000 epochs, and over the pairs of neighbours: 5 standard deviations from the mean at most."""
    rounds, places, pairs = 1000, collections.Counter(), collections.Counter()
    for epoch in range(rounds):
        found = order(range(n), n, 1, epoch)
        places.update(enumerate(found))
        pairs.update(itertools.pairwise(found))
    for counts, cells, expected in [(places, n * n, rounds / n), (pairs, n * (n - 1), rounds / n)]:
        chi = sum((count - expected) ** 2 / expected for count in counts.values()) + (cells - len(counts)) * expected
        assert abs(chi - cells) < 5 * (2 * cells) ** 0.5 + 2 * n, (chi, cells)


@few
@given(size=st.integers(1, 40), world=st.integers(1, 9), most=st.integers(1, 12))
def test_accumulated_gradients_are_those_of_the_global_batch(size, world, most):
    """The gradients are those of the mean loss over the step, averaged over the ranks. All ranks have the same number of parts."""
    values = torch.arange(1, 41, dtype=torch.float64) ** 2
    ranks = [mine[0].parts(most) for mine in shares(40, world, global_batch=size, drop_last=True)]
    assert len({len(parts) for parts in ranks}) == 1 and all(0 < len(part) <= most for parts in ranks for part in parts)
    averaged = sum(values[list(part)].mean() * part.weight for parts in ranks for part in parts) / world
    taken = steps(40, world, global_batch=size, drop_last=True)[0]
    assert averaged.item() == pytest.approx(values[taken].mean().item(), rel=1e-12)
    assert sorted(sample for parts in ranks for part in parts if part.weight for sample in part) == sorted(taken)


def test_positions_count_over_epochs():
    sampler = nm.ElasticSampler(100, global_batch=30, rank=0, world_size=1, seed=1)
    assert len(sampler) == 4 and [sampler.position(step) for step in (0, 3, 4, 9)] == [(0, 0), (0, 3), (1, 0), (2, 1)]
    assert len(nm.ElasticSampler(100, global_batch=30, drop_last=True)) == 3
    assert [len(mine) for mine in sampler.batches(0, 2)] == [30, 10] and list(sampler.batches(0, 4)) == []


def test_a_sample_has_one_seed_on_every_rank_and_a_rank_its_own():
    one, other = (nm.ElasticSampler(9, global_batch=3, rank=rank, world_size=2, seed=4) for rank in (0, 1))
    assert one.sample_seed(2, 5) == other.sample_seed(2, 5) != one.sample_seed(2, 6)
    assert one.rank_seed(2, 5) != other.rank_seed(2, 5)
    torch.Generator().manual_seed(one.sample_seed(0, 0))


def test_a_dataloader_takes_it():
    data = torch.arange(20)
    sampler = nm.ElasticSampler(20, global_batch=6, rank=1, world_size=2, seed=4)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler.batches(1, 1))
    assert [batch.tolist() for batch in loader] == [list(mine) for mine in sampler.batches(1, 1)]


@pytest.mark.parametrize(
    "wrong", [{"n": -1}, {"global_batch": 0}, {"rank": 2}, {"rank": -1}, {"world_size": 0}, {"rank": None}, {"n": 2.5}, {"global_batch": True}]
)
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(nm.NebulaConfigError):
        nm.ElasticSampler(**{"n": 9, "global_batch": 3, "rank": 0, "world_size": 2, **wrong})


@pytest.mark.parametrize("wrong", [-1, 2.0, "3", None, True, torch.arange(3), 1 << 60])
def test_a_position_is_a_whole_number(wrong):
    sampler = nm.ElasticSampler(9, global_batch=3, rank=0, world_size=2)
    for use in (sampler.position, lambda start: sampler.batches(0, start), lambda most: next(sampler.batches(0)).parts(most)):
        with pytest.raises(nm.NebulaConfigError, match="is a whole number from"):
            use(wrong)


@pytest.mark.parametrize("kind", [int, np.int32, torch.tensor])
def test_numbers_of_numpy_and_torch_are_taken(kind):
    sampler = nm.ElasticSampler(kind(9), global_batch=kind(3), rank=kind(0), world_size=kind(2))
    assert sampler.position(kind(4)) == (1, 1)
    wanted = nm.ElasticSampler(9, global_batch=3, rank=0, world_size=2)
    assert list(sampler.batches(kind(1), kind(1))) == list(wanted.batches(1, 1))


@pytest.mark.parametrize("world", [1, 2, 5, 7])
def test_with_drop_last_a_dataloader_takes_the_share_of_every_rank_and_its_length_gives_the_weight(world):
    taken = []
    for rank in range(world):
        sampler = nm.ElasticSampler(23, global_batch=7, rank=rank, world_size=world, drop_last=True)
        batches = list(torch.utils.data.DataLoader(torch.arange(23), batch_sampler=sampler.batches(0)))
        assert [len(batch) * world / 7 for batch in batches] == [mine.weight for mine in sampler.batches(0)]
        taken += [one for batch in batches for one in batch.tolist()]
    assert len(taken) == len(set(taken)) == 21


def test_rank_and_world_come_from_the_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert [len(mine) for mine in nm.ElasticSampler(9, global_batch=9).batches(0)] == [3]
    assert nm.ElasticSampler(9, global_batch=9).rank == 1
