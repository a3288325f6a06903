"""Seats that a living step has lost, from the loss until they are filled again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slurm_resilience.resume.decide.transitions import advance
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatRecord

TAKEN_FOR_SPARE = "a person took it out of the job"
"""The reason for a node's loss in whose place the job has a spare: no fault of it."""


class LossCause(Enum):
    """The reason for which seats were lost."""

    NODE_DEAD = "node dead"
    NODE_MARKED = "node marked"
    """The node still works, and must be left."""
    NODE_UNFIT = "node unfit"
    """It took no task again and again, and there was another one. No fault of it is known."""
    TASKS_DIED = "tasks died"
    """Their node is healthy, as far as is known."""
    NOT_LAUNCHED = "not launched"
    """srun could start no task on their node, of which no fault is known."""
    TAKEN_OUT = "node taken out"
    """A person has taken their node out of the job."""

    @property
    def blames_node(self) -> bool:
        return self in (LossCause.NODE_DEAD, LossCause.NODE_MARKED, LossCause.NODE_UNFIT)


class LostSeatState(Enum):
    """The life of a loss."""

    DIAGNOSING = "diagnosing"
    """Tasks died; their node may yet turn out to be at fault."""
    LOST = "lost"
    """A node is to be looked for."""
    SEARCHING = "searching"
    NODE_FOUND = "node_found"
    JOINING = "joining"
    """A join step runs."""
    FILLED = "filled"
    EMPTY = "empty"
    """The tasks died too often, or a person wants the node out of the job, or it takes no task and
    no other one came: the seats are not filled again."""
    LOST_AGAIN = "lost_again"
    """A later loss of the same seats stands for this one."""


_S = LostSeatState
LOST_SEAT_TRANSITIONS: dict[LostSeatState, frozenset[LostSeatState]] = {
    # A launcher may fill its seats by itself.
    _S.DIAGNOSING: frozenset({_S.LOST, _S.LOST_AGAIN}),
    _S.LOST: frozenset({_S.SEARCHING, _S.FILLED, _S.EMPTY, _S.LOST_AGAIN}),
    _S.SEARCHING: frozenset({_S.NODE_FOUND, _S.LOST, _S.LOST_AGAIN}),
    _S.NODE_FOUND: frozenset({_S.JOINING, _S.LOST_AGAIN}),
    _S.JOINING: frozenset({_S.FILLED, _S.LOST_AGAIN}),
    _S.EMPTY: frozenset({_S.FILLED, _S.LOST_AGAIN}),
    _S.FILLED: frozenset(),
    _S.LOST_AGAIN: frozenset(),
}


@dataclass(eq=False)
class LostSeats:
    """Seats of one node that are to be filled again. All times are monotonic seconds."""

    number: int
    """Names this loss within the attempt."""
    slot: NodeSlot
    """As it was."""
    seats: tuple[int, ...]
    cause: LossCause
    reason: str
    noticed: float
    before: SeatRecord
    due: float = 0.0
    """When the diagnosis is over."""
    node: str = ""
    """The one that takes the seats over."""
    step: int = 0
    """Number of the join step that fills them."""
    went_on: float | None = None
    """When the others stepped without them."""
    nodes_ready: float | None = None
    started: float | None = None
    filled: float | None = None
    state: LostSeatState = LostSeatState.LOST

    def enter(self, state: LostSeatState) -> None:
        """Change the state.

        Raises:
            IllegalTransition: `LOST_SEAT_TRANSITIONS` does not have the change.
        """
        self.state = advance(LOST_SEAT_TRANSITIONS, self.state, state)

    @property
    def pending(self) -> bool:
        """The seats are still to be filled."""
        return self.state not in (_S.FILLED, _S.EMPTY, _S.LOST_AGAIN)

    @property
    def without_node(self) -> bool:
        """No join step has been started yet."""
        return self.state in (_S.DIAGNOSING, _S.LOST, _S.SEARCHING, _S.NODE_FOUND)
