"""Which source serves which target: evenly, and from near. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

import msgspec

from slurm_resilience.mesh.model import View

MOST_SOURCES = 4
"""Sources that share one target; more would only queue at the target's own link."""
LONGEST_CHAIN = 4
"""Targets that pass the state on one to the next; more form a tree, two at each."""


class Route(msgspec.Struct, frozen=True):
    """One rank sends (a share of) one part to another."""

    source_rank: int
    target_rank: int
    part: int
    share: int = 0
    """Which of the equal shares of the part's bytes: 0 … shares-1."""
    shares: int = 1
    relay: bool = False
    """The source is itself healed now: it passes on what it has just received."""


def spread(view: View, part: int, sources: Sequence[int], targets: Sequence[int]) -> list[Route]:
    """Give every target its bytes.

    With enough sources, each target has its own, up to `MOST_SOURCES` equally near ones that send
    a share each. With fewer sources than targets, each source serves one target, which passes the
    state on: every link is used once or twice, however many there are.

    Args:
        view: the generation.
        part: what they hold.
        sources: ranks with the state, at least one if there are targets.
        targets: ranks that need it.
    """
    if not targets:
        return []
    served = _match(view, sources, targets)
    if len(targets) > len(sources):
        found = []
        for source in sorted(served):
            found += _tree(part, source, served[source])
        return found
    by_target = {target: [source] for source, mine in served.items() for target in mine}
    idle = [source for source in sources if source not in served]
    while idle:
        waiting = [t for t in targets if len(by_target[t]) < MOST_SOURCES]
        more = _match(view, idle, waiting, at_most=lambda t: _distance(view, by_target[t][0], t))
        if not more:
            break
        for source, mine in more.items():
            by_target[mine[0]].append(source)
        idle = [source for source in idle if source not in more]
    return [
        Route(source, target, part, share, len(by_target[target]))
        for target in targets
        for share, source in enumerate(by_target[target])
    ]


def _tree(part: int, source: int, targets: Sequence[int]) -> list[Route]:
    width = 1 if len(targets) <= LONGEST_CHAIN else 2
    found = [Route(source, targets[0], part)]
    for place in range(1, len(targets)):
        parent = targets[(place - 1) // width]
        found.append(Route(parent, targets[place], part, relay=True))
    return found


def _near(view: View) -> tuple[Callable[[int], Hashable], ...]:
    """Keys of nearness, nearest first: ranks with an equal key are that near to each other."""

    def node(rank: int) -> Hashable:
        peer = view.members[rank].peer
        return (peer.domain, peer.node) if peer.node else ("", "", rank)

    def domain(rank: int) -> Hashable:
        return view.members[rank].peer.domain or ("", rank)

    return node, domain, lambda rank: ""


def _distance(view: View, one: int, other: int) -> int:
    """0: the same node; 1: the same domain; 2: farther."""
    return next(level for level, key in enumerate(_near(view)) if key(one) == key(other))


def _match(
    view: View,
    sources: Sequence[int],
    targets: Sequence[int],
    at_most: Callable[[int], int] | None = None,
) -> dict[int, list[int]]:
    """Pair targets with sources, nearest first, in rounds in which each source takes one target.

    With `at_most` (the greatest distance for a target) there is one round, and targets may stay
    without a source.
    """
    served: dict[int, list[int]] = defaultdict(list)
    waiting = list(targets)
    while waiting:
        free = set(sources)
        for level, key in enumerate(_near(view)):
            pools: dict[Hashable, deque[int]] = defaultdict(deque)
            for source in sources:
                if source in free:
                    pools[key(source)].append(source)
            still = []
            for target in waiting:
                pool = pools.get(key(target))
                if pool and (at_most is None or level <= at_most(target)):
                    source = pool.popleft()
                    free.discard(source)
                    served[source].append(target)
                else:
                    still.append(target)
            waiting = still
        if at_most is not None:
            break
    return dict(served)
