"""The life of a node, from its first fault until it is back in service, as one table. Pure.

`TABLE` is the only place that says which state follows which event. The journal writes a node's
state through `step` alone, so a transition that the table lacks cannot be written. A state is that
of the node's last incident; a node without one is healthy.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from slurm_resilience.errors import IllegalTransition


class NodeState(enum.StrEnum):
    """The stage that sresctld has reached with a node."""

    HEALTHY = "healthy"
    """No incident is open."""
    SUSPECT = "suspect"
    """A fault was found, and Slurm does not show it yet: nothing that cannot be undone was done."""
    SET_ASIDE = "set-aside"
    """Slurm shows the reason and starts no new job; the jobs on the node may still end."""
    EMPTY = "empty"
    """No job is left: the replacement waits for its turn, its next try, or a program."""
    REPAIRING = "repairing"
    """The replacement program runs."""
    VALIDATING = "validating"
    """The program ended well, or the node lives again by itself: it must answer and be sound."""
    RETURNING = "returning"
    """The node was given back to Slurm (node resume), which must show it in service."""
    QUARANTINED = "quarantined"
    """The replacement failed, or the node came and went, too often: a person must look."""
    HELD = "held"
    """A person keeps the node: sresctld leaves it alone."""

    @property
    def is_under_way(self) -> bool:
        """An incident is open, and sresctld has the next move."""
        return self in _UNDER_WAY

    @property
    def is_at_rest(self) -> bool:
        """The node was left to a person, whose event alone leads out of it."""
        return self in _AT_REST

    @property
    def is_marked(self) -> bool:
        """Slurm shows (or showed, until the node was given back) why the node is out of service."""
        return self.is_under_way and self is not NodeState.SUSPECT

    @property
    def waits_for_repair(self) -> bool:
        """The node is out of service, and no program has been started or the last one failed."""
        return self in (NodeState.SET_ASIDE, NodeState.EMPTY)

    @property
    def is_running_program(self) -> bool:
        """The replacement program runs, or has ended and was not judged yet."""
        return self is NodeState.REPAIRING

    @property
    def is_in_repair(self) -> bool:
        """The program runs, or has run, or none was needed: silence is judged by the incident."""
        return self in (NodeState.REPAIRING, NodeState.VALIDATING, NodeState.RETURNING)

    @property
    def is_coming_back(self) -> bool:
        """No program runs any more, and the node must show that it lives and is sound."""
        return self in (NodeState.VALIDATING, NodeState.RETURNING)


_UNDER_WAY = frozenset(
    {
        NodeState.SUSPECT,
        NodeState.SET_ASIDE,
        NodeState.EMPTY,
        NodeState.REPAIRING,
        NodeState.VALIDATING,
        NodeState.RETURNING,
    }
)
_AT_REST = frozenset({NodeState.QUARANTINED, NodeState.HELD})


class NodeEvent(enum.StrEnum):
    """An event that moves a node to a state. The value is the event's kind in the journal."""

    DETECTED = "detected"
    """sresctld found the node dead or sick."""
    RECOVERED = "recovered"
    """The fault was gone before the node was marked: sresctld changed its mind."""
    MARKED = "marked"
    """Slurm shows the node's state and reason."""
    EMPTIED = "emptied"
    """The last job has left the node."""
    OCCUPIED = "occupied"
    """A job came to the node after all."""
    REPLACING = "replacing"
    """The replacement program is about to be started."""
    REPLACED = "replaced"
    """The program ended well."""
    REPLACEMENT_FAILED = "replacement-failed"
    """The program failed or the node did not come back; another try follows."""
    CAME_BACK = "came-back"
    """The node lives again and nothing is found on it: it is not replaced. A flap."""
    GONE_AGAIN = "gone-again"
    """The node that had come back by itself was lost again before it was in service."""
    JUDGED_ANEW = "judged-anew"
    """The same of a node that sresctld had never marked: it is judged like one in service."""
    GAVE_UP = "gave-up"
    """The replacement failed, or the node came and went, as often as the configuration allows."""
    RESUMED = "resumed"
    """sresctld gave the node back to Slurm (node resume)."""
    CLOSED = "closed"
    """Slurm shows the node in service."""
    REQUESTED = "requested"
    """A person asked for a replacement or a reboot."""
    ASKED_ANEW = "asked-anew"
    """A person asked for something else, or for the same thing once more, in mid-incident."""
    RELEASED = "released"
    """A person took the request back, or put the node back into service."""
    TAKEN_OVER = "taken-over"
    """A person keeps the node out of service for a reason of his own."""
    REMOVED = "removed"
    """A person removed the node from Slurm's configuration."""

    @property
    def is_a_persons(self) -> bool:
        return self in _OF_PERSONS


_OF_PERSONS = frozenset(
    {
        NodeEvent.REQUESTED,
        NodeEvent.ASKED_ANEW,
        NodeEvent.RELEASED,
        NodeEvent.TAKEN_OVER,
        NodeEvent.REMOVED,
    }
)


class SideAct(enum.Enum):
    """An act that belongs to a transition, beside the new state."""

    STOP_PROGRAM = "stop the replacement program"
    FORGET_PROBES = "forget the answers from before the replacement"


class Step(NamedTuple):
    """A row of the table: the state that follows, and what is done on the way."""

    state: NodeState
    acts: tuple[SideAct, ...] = ()


_S, _E = NodeState, NodeEvent

TABLE: Mapping[tuple[NodeState, NodeEvent], Step] = {
    (_S.HEALTHY, _E.DETECTED): Step(_S.SUSPECT),
    (_S.HEALTHY, _E.REQUESTED): Step(_S.SET_ASIDE),
    # Slurm set it DOWN itself, while the breaker or an unsupervised job kept sresctld from it.
    (_S.HEALTHY, _E.CAME_BACK): Step(_S.VALIDATING),
    #
    (_S.SUSPECT, _E.MARKED): Step(_S.SET_ASIDE),
    (_S.SUSPECT, _E.RECOVERED): Step(_S.HEALTHY),
    (_S.SUSPECT, _E.TAKEN_OVER): Step(_S.HELD),
    (_S.SUSPECT, _E.REMOVED): Step(_S.HELD),
    # MARKED once more: it was to be left gracefully, and died with its jobs on it.
    (_S.SET_ASIDE, _E.MARKED): Step(_S.SET_ASIDE),
    (_S.SET_ASIDE, _E.EMPTIED): Step(_S.EMPTY),
    (_S.SET_ASIDE, _E.RELEASED): Step(_S.HEALTHY),
    (_S.SET_ASIDE, _E.TAKEN_OVER): Step(_S.HELD),
    (_S.SET_ASIDE, _E.ASKED_ANEW): Step(_S.HELD),
    (_S.SET_ASIDE, _E.REMOVED): Step(_S.HELD),
    #
    (_S.EMPTY, _E.MARKED): Step(_S.SET_ASIDE),
    (_S.EMPTY, _E.OCCUPIED): Step(_S.SET_ASIDE),
    (_S.EMPTY, _E.REPLACING): Step(_S.REPAIRING),
    (_S.EMPTY, _E.CAME_BACK): Step(_S.VALIDATING, (SideAct.FORGET_PROBES,)),
    (_S.EMPTY, _E.GAVE_UP): Step(_S.QUARANTINED),
    (_S.EMPTY, _E.RELEASED): Step(_S.HEALTHY),
    (_S.EMPTY, _E.TAKEN_OVER): Step(_S.HELD),
    (_S.EMPTY, _E.ASKED_ANEW): Step(_S.HELD),
    (_S.EMPTY, _E.REMOVED): Step(_S.HELD),
    #
    (_S.REPAIRING, _E.REPLACED): Step(_S.VALIDATING, (SideAct.FORGET_PROBES,)),
    (_S.REPAIRING, _E.REPLACEMENT_FAILED): Step(_S.EMPTY),
    (_S.REPAIRING, _E.GAVE_UP): Step(_S.QUARANTINED),
    (_S.REPAIRING, _E.RELEASED): Step(_S.HEALTHY, (SideAct.STOP_PROGRAM,)),
    (_S.REPAIRING, _E.TAKEN_OVER): Step(_S.HELD, (SideAct.STOP_PROGRAM,)),
    (_S.REPAIRING, _E.REMOVED): Step(_S.HELD, (SideAct.STOP_PROGRAM,)),
    #
    (_S.VALIDATING, _E.RESUMED): Step(_S.RETURNING),
    (_S.VALIDATING, _E.CLOSED): Step(_S.HEALTHY),
    (_S.VALIDATING, _E.REPLACEMENT_FAILED): Step(_S.EMPTY),
    (_S.VALIDATING, _E.GONE_AGAIN): Step(_S.EMPTY),
    (_S.VALIDATING, _E.JUDGED_ANEW): Step(_S.HEALTHY),
    (_S.VALIDATING, _E.GAVE_UP): Step(_S.QUARANTINED),
    (_S.VALIDATING, _E.RELEASED): Step(_S.HEALTHY),
    (_S.VALIDATING, _E.TAKEN_OVER): Step(_S.HELD),
    (_S.VALIDATING, _E.ASKED_ANEW): Step(_S.HELD),
    (_S.VALIDATING, _E.REMOVED): Step(_S.HELD),
    # RESUMED once more: Slurm did not take the first one.
    (_S.RETURNING, _E.RESUMED): Step(_S.RETURNING),
    (_S.RETURNING, _E.CLOSED): Step(_S.HEALTHY),
    (_S.RETURNING, _E.REPLACEMENT_FAILED): Step(_S.EMPTY),
    (_S.RETURNING, _E.GONE_AGAIN): Step(_S.EMPTY),
    (_S.RETURNING, _E.JUDGED_ANEW): Step(_S.HEALTHY),
    (_S.RETURNING, _E.GAVE_UP): Step(_S.QUARANTINED),
    (_S.RETURNING, _E.ASKED_ANEW): Step(_S.HELD),
    (_S.RETURNING, _E.TAKEN_OVER): Step(_S.HELD),
    (_S.RETURNING, _E.REMOVED): Step(_S.HELD),
    #
    (_S.QUARANTINED, _E.REQUESTED): Step(_S.SET_ASIDE),
    (_S.QUARANTINED, _E.RELEASED): Step(_S.HEALTHY),
    (_S.QUARANTINED, _E.TAKEN_OVER): Step(_S.HELD),
    #
    (_S.HELD, _E.REQUESTED): Step(_S.SET_ASIDE),
    (_S.HELD, _E.RELEASED): Step(_S.HEALTHY),
}


def step(state: NodeState, event: NodeEvent) -> Step:
    """Return the row of the table for this state and event.

    Raises:
        IllegalTransition: the table has none.
    """
    try:
        return TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"a node that is {state} cannot be {event}") from None
