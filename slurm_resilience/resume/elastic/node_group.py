"""A group of an elastic step: the nodes of one companion, and the life of its ranks. Pure.

VACANT → ASKED → JOINING → IN → LEAVING → VACANT
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from slurm_resilience.resume.decide.transitions import advance


class GroupState(Enum):
    """The life of a group."""

    VACANT = "vacant"
    ASKED = "asked"
    """Its companion waits in Slurm's queue."""
    JOINING = "joining"
    """Its ranks were started, and do not step yet."""
    IN = "in"
    LEAVING = "leaving"
    """Its ranks go, or some have gone."""


_S = GroupState
GROUP_TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    _S.VACANT: frozenset({_S.ASKED}),
    _S.ASKED: frozenset({_S.JOINING, _S.VACANT}),
    _S.JOINING: frozenset({_S.IN, _S.LEAVING, _S.VACANT}),
    _S.IN: frozenset({_S.LEAVING}),
    _S.LEAVING: frozenset({_S.VACANT}),
}


@dataclass
class RankEnds:
    """The ends of a group's ranks."""

    failed: str = ""
    """The reason, where those that go have died before."""
    failures: int = 0
    """In a row."""
    is_unasked: bool = False
    """Those that go ended with 0 soon after their first step, as ranks do that are asked to leave,
    and nothing shows that Slurm or a person has asked them."""
    unasked: int = 0
    """Such ends, as far as Slurm confirms them, since ranks that stayed long."""


@dataclass(eq=False)
class NodeGroup:
    """One group. All times are monotonic seconds."""

    number: int
    ranks: range
    """Its node ranks."""
    companion: int = 0
    """0: it has none yet."""
    nodes: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    """Numbers of its sruns that run."""
    since: float = 0.0
    """When it got its nodes."""
    deadline: float = 0.0
    """Infinite: it goes because a person wants fewer, between two steps."""
    remind_at: float = math.inf
    """Its ranks are asked to leave once more then."""
    again_at: float = float("-inf")
    """It is not asked for earlier."""
    proven_at: float = 0.0
    """Once it has been in: its ranks have stepped for long by then."""
    apart_seconds: float = 0.0
    """For so long others have stepped, and none of its ranks, since one of them has."""
    ends: RankEnds = field(default_factory=RankEnds)
    reason: str = ""
    """For its going."""
    state: GroupState = GroupState.VACANT

    def enter(self, state: GroupState) -> None:
        """Change the state.

        Raises:
            IllegalTransition: `GROUP_TRANSITIONS` does not have the change.
        """
        self.state = advance(GROUP_TRANSITIONS, self.state, state)

    @property
    def holds_nodes(self) -> bool:
        return self.state in (_S.JOINING, _S.IN, _S.LEAVING)


_STANDING = {_S.IN: 0, _S.JOINING: 1, _S.ASKED: 2, _S.VACANT: 3, _S.LEAVING: 4}


def seniority(group: NodeGroup) -> tuple[int, float, int]:
    """Return what tells which groups stay where fewer are wanted, the first that stay first."""
    return _STANDING[group.state], group.since if group.holds_nodes else 0.0, group.number
