"""The samples of a batch: the same on every rank, for ever, and each sample once an epoch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from slurm_resilience.training.data.order import (  # noqa: E402
    SampleOrder,
    bounds_of,
    draw,
    last,
    permute,
    share,
)

orders = st.builds(
    SampleOrder,
    length=st.integers(1, 120),
    global_batch=st.integers(1, 40),
    seed=st.integers(-(2**70), 2**70),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
).filter(lambda order: order.per_epoch > 0)


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(0, 2**64), st.integers(0, 2**40))
def test_an_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    found = permute(np.arange(length, dtype=np.int64), length, seed, epoch)
    assert sorted(found.tolist()) == list(range(length))


@settings(deadline=None)
@given(st.integers(1, 2**50), st.integers(0, 2**64), st.data())
def test_an_index_is_found_without_its_neighbours(
    length: int, seed: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=9, unique=True))
    together = permute(np.array(places, dtype=np.int64), length, seed, 3).tolist()
    alone = [permute(np.array([p], dtype=np.int64), length, seed, 3).item() for p in places]
    assert together == alone
    assert len(set(together)) == len(places)
    assert all(0 <= index < length for index in together)


def test_the_order_never_changes_between_versions() -> None:
    """These numbers were drawn once; a run that is under way relies on them."""
    assert SampleOrder(length=10, global_batch=5, seed=7).indices(1).tolist() == [6, 8, 9, 5, 1]
    assert SampleOrder(length=10**12, global_batch=3, seed=7).indices(10**9).tolist() == [
        186422433911,
        288406795613,
        944289216078,
    ]


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(any),
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=9),
)
def test_a_sample_of_no_weight_is_never_drawn(
    weights: list[float], seed: int, epoch: int, places: list[int]
) -> None:
    bounds = bounds_of(np.array(weights))
    found = draw(np.array(places, dtype=np.int64), bounds, seed, epoch).tolist()
    assert all(weights[index] > 0 for index in found)
    alone = [draw(np.array([p], dtype=np.int64), bounds, seed, epoch).item() for p in places]
    assert found == alone


def test_what_is_drawn_never_changes_between_versions() -> None:
    """As above."""
    bounds = bounds_of(np.array([1.0, 0.0, 2.0, 5.0]))
    order = SampleOrder(length=4, global_batch=4, seed=7, bounds=bounds)
    assert [order.indices(number).tolist() for number in range(3)] == [
        [3, 3, 3, 3],
        [3, 3, 2, 0],
        [3, 3, 3, 2],
    ]


def test_samples_come_as_often_as_their_weights_say() -> None:
    """Chi-squared over the draws of 40 epochs, against what lots would give."""
    weights = np.array([1.0, 0.0, 2.0, 3.0, 0.5, 10.0])
    bounds, places = bounds_of(weights), np.arange(1000, dtype=np.int64)
    drawn = np.concatenate([draw(places, bounds, 5, epoch) for epoch in range(40)])
    counts = np.bincount(drawn, minlength=6)
    expected = weights / weights.sum() * drawn.size
    chi = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert counts[1] == 0
    assert chi < 4 + 6 * 8**0.5, (chi, counts)


@pytest.mark.parametrize("length", [2, 3, 5, 7, 10, 12, 16])
def test_every_place_is_as_likely_for_every_sample(length: int) -> None:
    """Chi-squared of (place, sample) counts over many seeds, against what lots would give."""
    seeds = 1000
    counts = np.zeros((length, length))
    places = np.arange(length, dtype=np.int64)
    for seed in range(seeds):
        counts[places, permute(places, length, seed, 0)] += 1
    expected = seeds / length
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = (length - 1) ** 2
    assert chi < freedom + 6 * (2 * freedom) ** 0.5, (chi, freedom)


def test_neighbours_are_strangers() -> None:
    found = permute(np.arange(100_000, dtype=np.int64), 100_000, 1, 0)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    assert (np.diff(found) == 1).sum() < 12
    other = permute(np.arange(100_000, dtype=np.int64), 100_000, 1, 1)
    assert (found == other).sum() < 12


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 64))
def test_shares_join_without_gap_or_overlap(size: int, world: int) -> None:
    parts = [share(size, rank, world) for rank in range(world)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(one[1] == two[0] for one, two in pairwise(parts))
    assert max(e - b for b, e in parts) - min(e - b for b, e in parts) <= 1


@settings(deadline=None)
@given(orders, st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 3))
def test_every_sample_once_an_epoch_whatever_the_worlds(
    order: SampleOrder, worlds: list[int], epoch: int
) -> None:
    seen: Counter[int] = Counter()
    for at in range(order.per_epoch):
        number = epoch * order.per_epoch + at
        world = worlds[at % len(worlds)]
        for rank in range(world):
            seen.update(order.indices(number, *order.share(number, rank, world)).tolist())
    assert set(seen.values()) <= {1}
    left_out = order.length % order.global_batch if order.drop_last else 0
    assert len(seen) == order.length - left_out


@settings(deadline=None)
@given(orders, st.integers(0, 100))
def test_a_share_is_cut_from_the_whole(order: SampleOrder, number: int) -> None:
    whole = order.indices(number).tolist()
    assert len(whole) == order.size(number) <= order.global_batch
    begin, end = order.share(number, 1, 3)
    assert order.indices(number, begin, end).tolist() == whole[begin:end]
    if not order.shuffle:
        first = number % order.per_epoch * order.global_batch
        assert whole == list(range(first, first + len(whole)))


def test_the_end_of_the_run() -> None:
    assert last(10, 3, None) == 30
    assert last(10, 3, 12) == 12
    assert last(10, None, None) is None
    assert last(None, 3, None) is None
    assert last(None, None, 5) == 5
