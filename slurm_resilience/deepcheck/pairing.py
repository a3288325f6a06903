"""Find the slow node of a cluster by rounds of pairs that are measured at the same time. Pure.

A collective over all nodes is as slow as its slowest link, and does not say whose link that is. So
all nodes are measured in pairs. Both of a fast pair are good. In the next round each node of a
slow pair gets a partner that is good, which tells the two apart. All others are paired anew too, so
that each round puts the same load on the network, and its pairs can be compared. A few rounds do,
whatever the number of nodes; N nodes get at most log2(N) + 3.

A node is named when it was slow with two nodes that are good. A single slow pair of two good nodes
is a slow path between them: it is told, and neither of them is named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

REFERENCE_SHARE = 0.75
"""The place, among all pairs in rising order, of the pair that the others are compared with. The
best one would be a matter of luck among a thousand; the middle one could itself be slow."""
SLOW_SHARE = 0.5
"""A pair below this share of the reference is slow."""
PAIRS_OF_EACH = 2
"""Pairs that each node is in at least: with one alone there is nothing to compare."""


class NodePair(NamedTuple):
    """Two nodes that are measured together."""

    first: str
    second: str


class PairMeasure(NamedTuple):
    """The outcome of one pair."""

    pair: NodePair
    bandwidth: float | None
    """Bus bandwidth, GB/s; None: the pair came to no result."""
    wrong: int = 0
    """Elements with a wrong value."""


Rounds = Sequence[Sequence[PairMeasure]]
"""The measures of each round so far."""


class PairingConclusion(NamedTuple):
    """The conclusion from all rounds."""

    slow: tuple[str, ...]
    """Nodes that are slow with others, while those are fast among themselves."""
    slow_paths: tuple[NodePair, ...]
    """Slow pairs of two nodes that are fast with others."""
    unsettled: tuple[str, ...]
    """Nodes of which nothing can be said."""
    minimum: float | None
    """The bandwidth that a pair had to reach, GB/s; None: there was nothing to compare with."""


def most_rounds(nodes: int) -> int:
    """Return the bound on the rounds for a number of nodes."""
    return math.ceil(math.log2(max(nodes, 2))) + 3


def minimum_of(measures: Iterable[PairMeasure], threshold: float | None = None) -> float | None:
    """Return the bandwidth that a pair has to reach.

    Args:
        measures: all pairs so far.
        threshold: a figure that is known for the hardware; it goes before the comparison.
    """
    if threshold is not None:
        return threshold
    values = sorted(m.bandwidth for m in measures if m.bandwidth is not None)
    if not values:
        return None
    place = math.ceil(REFERENCE_SHARE * len(values)) - 1
    return values[place] * SLOW_SHARE


def next_pairs(
    nodes: Sequence[str], rounds: Rounds, threshold: float | None = None
) -> tuple[NodePair, ...]:
    """Return the pairs of the next round; none when there is no more to learn."""
    measures = [measure for one in rounds for measure in one]
    view = _view(nodes, measures, threshold)
    if not view.open_nodes or len(rounds) >= most_rounds(len(nodes)):
        return ()
    met = {frozenset(m.pair) for m in measures}
    free = dict.fromkeys(nodes)
    pairs = []
    # The nodes to be told apart choose first, and choose among the good ones.
    for node in (*view.open_nodes, *nodes):
        if node not in free:
            continue
        others = [one for one in free if one != node and frozenset((node, one)) not in met]
        partner = next((one for one in others if one in view.good), next(iter(others), None))
        if partner is None:
            continue
        del free[node], free[partner]
        pairs.append(NodePair(node, partner))
    is_open = set(view.open_nodes)
    return tuple(pairs) if any(is_open & set(pair) for pair in pairs) else ()


def conclude(
    nodes: Sequence[str], rounds: Rounds, threshold: float | None = None
) -> PairingConclusion:
    """Return what all rounds together say."""
    measures = [measure for one in rounds for measure in one]
    view = _view(nodes, measures, threshold)
    named = set(view.slow)
    paths = [m.pair for m in view.slow_measures if not named & set(m.pair)]
    settled = view.good | named
    if threshold is None and len(nodes) <= PAIRS_OF_EACH:
        # Two nodes have one pair, which is as fast as itself.
        settled = frozenset()
    return PairingConclusion(
        view.slow,
        tuple(pair for pair in paths if set(pair) <= settled),
        tuple(node for node in nodes if node not in settled),
        minimum_of(measures, threshold),
    )


class _View(NamedTuple):
    good: frozenset[str]
    slow: tuple[str, ...]
    open_nodes: tuple[str, ...]
    slow_measures: tuple[PairMeasure, ...]


def _view(nodes: Sequence[str], measures: Sequence[PairMeasure], threshold: float | None) -> _View:
    minimum = minimum_of(measures, threshold)
    slow_measures = tuple(m for m in measures if not _is_fast(m, minimum))
    good = frozenset(node for m in measures if _is_fast(m, minimum) for node in m.pair)
    slow_with_good: dict[str, set[str]] = defaultdict(set)
    count: dict[str, int] = defaultdict(int)
    for measure in measures:
        for node in measure.pair:
            count[node] += 1
    for measure in slow_measures:
        for node, other in (measure.pair, measure.pair[::-1]):
            if other in good:
                slow_with_good[node].add(other)
    slow = tuple(node for node in nodes if len(slow_with_good[node]) >= PAIRS_OF_EACH)
    wanted = min(PAIRS_OF_EACH, len(nodes) - 1)
    open_nodes = tuple(
        node for node in nodes if node not in slow and (node not in good or count[node] < wanted)
    )
    return _View(good - set(slow), slow, open_nodes, slow_measures)


def _is_fast(measure: PairMeasure, minimum: float | None) -> bool:
    return (
        minimum is not None
        and measure.bandwidth is not None
        and measure.bandwidth >= minimum
        and measure.wrong == 0
    )
