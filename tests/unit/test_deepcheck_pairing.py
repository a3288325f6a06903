"""The rounds of pairs name the slow node, whichever it is, and no other."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.deepcheck.pairing import (
    NodePair,
    PairingConclusion,
    PairMeasure,
    conclude,
    most_rounds,
    next_pairs,
)

Bandwidth = Callable[[str, str], float | None]


def isolate(
    count: int, bandwidth: Bandwidth, threshold: float | None = None
) -> tuple[PairingConclusion, int]:
    """Return the conclusion, and the rounds that it took."""
    nodes = [f"n{number}" for number in range(count)]
    rounds: list[list[PairMeasure]] = []
    while pairs := next_pairs(nodes, rounds, threshold):
        assert len(rounds) < most_rounds(count), "the rounds have no end"
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)), "a node is in two pairs of one round"
        before = {frozenset(m.pair) for one in rounds for m in one}
        assert not before & {frozenset(pair) for pair in pairs}, "a pair is measured twice"
        rounds.append([PairMeasure(pair, bandwidth(*pair)) for pair in pairs])
    return conclude(nodes, rounds, threshold), len(rounds)


clusters = st.integers(3, 70)
jitter = st.floats(0.8, 1.0)


@given(st.data(), clusters, st.sampled_from([0.0, 0.05, 0.3]), st.randoms(use_true_random=False))
def test_any_one_slow_node_is_named_and_no_other(data, count, speed, random) -> None:  # type: ignore[no-untyped-def]
    bad = f"n{data.draw(st.integers(0, count - 1))}"

    def bandwidth(one: str, other: str) -> float | None:
        if bad in (one, other):
            return speed * 10 or None
        return 10 * random.uniform(0.8, 1.0)

    found, _ = isolate(count, bandwidth)
    assert found.slow == (bad,)
    assert found.unsettled == ()
    assert found.slow_paths == ()


@given(st.data(), clusters)
def test_a_slow_path_between_two_good_nodes_names_neither(data, count) -> None:  # type: ignore[no-untyped-def]
    at = data.draw(st.integers(0, count - 1))
    other = data.draw(st.integers(0, count - 1).filter(lambda value: value != at))
    path = {f"n{at}", f"n{other}"}
    found, _ = isolate(count, lambda one, two: 1.0 if {one, two} == path else 10.0)
    assert found.slow == ()
    assert found.unsettled == ()
    assert {frozenset(pair) for pair in found.slow_paths} <= {frozenset(path)}


@given(clusters, st.randoms(use_true_random=False))
def test_a_healthy_cluster_has_no_slow_node(count, random) -> None:  # type: ignore[no-untyped-def]
    found, rounds = isolate(count, lambda *_: random.uniform(6.0, 10.0))
    assert found.slow == found.unsettled == ()
    assert rounds <= 4


@given(st.data(), st.integers(8, 64), st.sampled_from([None, 5.0]))
def test_several_slow_nodes_are_named_and_no_other(data, count, threshold) -> None:  # type: ignore[no-untyped-def]
    bad = {
        f"n{number}"
        for number in data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count // 8))
    }
    found, _ = isolate(count, lambda *pair: 1.0 if bad & set(pair) else 10.0, threshold)
    assert set(found.slow) == bad
    assert found.unsettled == ()


@given(st.integers(2, 40))
def test_where_every_pair_is_too_slow_no_node_is_named(count) -> None:  # type: ignore[no-untyped-def]
    found, _ = isolate(count, lambda *_: 1.0, threshold=5.0)
    assert found.slow == ()
    assert len(found.unsettled) == count


def test_two_nodes_cannot_be_compared_without_a_threshold() -> None:
    found, _ = isolate(2, lambda *_: 1.0)
    assert found.slow == () and found.unsettled == ("n0", "n1")
    found, _ = isolate(2, lambda *_: 8.0, threshold=5.0)
    assert found.unsettled == () and found.slow == ()


def test_a_pair_with_a_wrong_value_is_not_a_good_one() -> None:
    nodes = ["a", "b", "c", "d"]
    measures = [
        PairMeasure(NodePair("a", "b"), 10.0, wrong=3),
        PairMeasure(NodePair("c", "d"), 10.0),
        PairMeasure(NodePair("a", "c"), 10.0, wrong=1),
        PairMeasure(NodePair("b", "d"), 10.0),
        PairMeasure(NodePair("a", "d"), 10.0, wrong=1),
        PairMeasure(NodePair("b", "c"), 10.0),
    ]
    assert conclude(nodes, [measures]).slow == ("a",)
