"""Microbatches are shared out whole, once, and weighed as one batch; sums have one order."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.training.elastic.plan import StepSpan, plan
from slurm_resilience.training.elastic.rates import check_policy, rate_factor
from slurm_resilience.training.elastic.reduction_tree import TreeNode, TreeSum, nodes_of

worlds = st.integers(1, 40)
counts = st.integers(1, 130)


@settings(deadline=None)
@given(st.integers(0, 10**12), counts, worlds)
def test_each_microbatch_has_one_rank_and_all_make_the_same_calls(
    first: int, count: int, world: int
) -> None:
    shares = plan(StepSpan(first, count), world)
    assert len(shares) == world
    assert [number for share in shares for number in share.own] == list(range(first, first + count))
    assert len({len(share.calls) for share in shares}) == 1
    assert len(shares[0].calls) == -(-count // world)
    for share in shares:
        assert [number for number, counts in share.calls if counts] == list(share.own)
        # Padding repeats what the rank has read, or a microbatch of the same step.
        assert all(first <= number < first + count for number, _ in share.calls)


@settings(deadline=None)
@given(counts, st.integers(1, 12), st.integers(1, 5))
def test_ranks_of_a_group_take_turns_and_each_round_is_the_same_in_any_world(
    count: int, groups: int, together: int
) -> None:
    shares = plan(StepSpan(0, count), groups * together, together)
    assert sorted(number for share in shares for number in share.own) == list(range(count))
    assert len({len(share.calls) for share in shares}) == 1
    rounds: dict[int, list[int]] = {}
    for rank, share in enumerate(shares):
        assert share.leaves == shares[rank - rank % together].leaves
        for leaf, (number, counts) in zip(share.leaves, share.calls, strict=False):
            rounds.setdefault(leaf, []).extend([number] if counts else [])
            assert number // together == leaf or not counts
    whole = range(0, count, together)
    assert [sorted(rounds[leaf]) for leaf in sorted(rounds)] == [
        list(range(begin, min(begin + together, count))) for begin in whole
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(worlds, st.integers(0, 20)), min_size=1, max_size=30), counts)
def test_no_microbatch_is_lost_or_repeated_through_any_changes(
    changes: list[tuple[int, int]], count: int
) -> None:
    """A change of the world repeats the step that it broke off, and no other."""
    position, done = 0, []
    for world, steps in changes:
        for _ in range(steps):
            shares = plan(StepSpan(position, count), world)
            done += [number for share in shares for number in share.own]
            position += count
        plan(StepSpan(position, count), world)  # begun, and not committed
    assert done == list(range(position))


@settings(deadline=None)
@given(st.lists(st.integers(1, 4096), min_size=1, max_size=60), worlds)
def test_the_weights_of_all_calls_sum_to_one(sizes: list[int], world: int) -> None:
    total, found = sum(sizes), Fraction(0)
    for share in plan(StepSpan(0, len(sizes)), world):
        found += sum(Fraction(sizes[number], total) for number, counts in share.calls if counts)
    assert found == 1


@pytest.mark.parametrize(("count", "world", "together"), [(0, 2, 1), (4, 0, 1), (4, 3, 2)])
def test_a_step_without_microbatches_or_ranks_is_refused(
    count: int, world: int, together: int
) -> None:
    with pytest.raises(UsageError, match="cannot be shared"):
        plan(StepSpan(0, count), world, together)


# --- the tree -------------------------------------------------------------------------------


def text(count: int, world: int) -> str:
    """Add letters as a world of this size does: each rank its nodes, then all of them together."""
    whole = TreeSum[str](count, lambda left, right: f"({left}+{right})")
    for share in plan(StepSpan(0, count), world):
        own = TreeSum[str](count, lambda left, right: f"({left}+{right})")
        for leaf in share.own:
            own.put(TreeNode(0, leaf), str(leaf))
        assert [node for node, _ in own.parts] == nodes_of(share.own, count)
        for node, value in own.parts:
            whole.put(node, value)
    return whole.total()


@settings(deadline=None)
@given(counts, worlds)
def test_the_order_of_additions_is_that_of_one_rank_alone(count: int, world: int) -> None:
    assert text(count, world) == text(count, 1)


def test_the_tree_never_changes_between_versions() -> None:
    """A run that is under way relies on it."""
    assert text(1, 3) == "0"
    assert text(6, 3) == "(((0+1)+(2+3))+(4+5))"
    assert text(7, 2) == "(((0+1)+(2+3))+((4+5)+6))"


@settings(deadline=None)
@given(st.integers(1, 5000), st.data())
def test_a_range_has_few_nodes(count: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(begin + 1, count))
    nodes = nodes_of(range(begin, end), count)
    assert len(nodes) <= 2 * (end - begin).bit_length()
    edges = [(n.place << n.level, min((n.place + 1) << n.level, count)) for n in nodes]
    assert edges[0][0] == begin
    assert edges[-1][1] == end
    assert all(one[1] == two[0] for one, two in pairwise(edges))


def test_a_sum_with_missing_leaves_is_refused() -> None:
    begun = TreeSum[int](3, lambda left, right: left + right)
    for leaf in range(2):
        begun.put(TreeNode(0, leaf), 1)
    with pytest.raises(ValueError, match="of 3 leaves only"):
        begun.total()


# --- learning rates -------------------------------------------------------------------------


def test_the_rate_follows_the_batch_as_the_policy_says() -> None:
    assert rate_factor("constant", 16, 64) == 1.0
    assert rate_factor("linear", 16, 64) == 0.25
    assert rate_factor("sqrt", 16, 64) == 0.5
    assert rate_factor(lambda samples, full: samples / (2 * full), 64, 64) == 0.5


@pytest.mark.parametrize("found", [0.0, -1.0, float("nan"), float("inf")])
def test_a_policy_that_gives_no_rate_is_refused(found: float) -> None:
    with pytest.raises(UsageError, match="positive number"):
        rate_factor(lambda samples, full: found, 1, 1)


def test_an_unknown_policy_is_refused_by_name() -> None:
    check_policy("sqrt")
    check_policy(lambda samples, full: 1.0)
    with pytest.raises(UsageError, match="rate='cubic': write one of constant, linear, sqrt"):
        check_policy("cubic")
