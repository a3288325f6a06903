"""All losses and join steps of one living attempt. Pure."""

from __future__ import annotations

from slurm_resilience.resume.live_step.join_step import JoinAttempt, JoinState
from slurm_resilience.resume.live_step.losses import (
    TAKEN_FOR_SPARE,
    LossCause,
    LostSeats,
    LostSeatState,
)


class LossRecord:
    """The losses so far, and the join steps that were started for them."""

    def __init__(self) -> None:
        self.losses: list[LostSeats] = []
        """The oldest first."""
        self.joins: list[JoinAttempt] = []
        """One for each step after the first."""

    @property
    def unfilled(self) -> list[LostSeats]:
        """Return the losses whose seats are to be filled, or stay empty."""
        return [loss for loss in self.losses if loss.pending or loss.state is LostSeatState.EMPTY]

    @property
    def any_pending(self) -> bool:
        """Return whether seats are still to be filled."""
        return any(loss.pending for loss in self.losses)

    def leave_out(self, seats: tuple[int, ...]) -> None:
        """Let the losses and join steps that stand for more than these seats go on without them."""
        for loss in self.losses:
            if loss.pending or loss.state is LostSeatState.EMPTY:
                loss.seats = tuple(seat for seat in loss.seats if seat not in seats)
        for join in self.joins:
            if join.pending:
                join.seats = tuple(seat for seat in join.seats if seat not in seats)

    def give_up(self, losses: list[LostSeats]) -> None:
        """Let a later loss stand for these."""
        for loss in losses:
            if loss.pending or loss.state is LostSeatState.EMPTY:
                loss.enter(LostSeatState.LOST_AGAIN)
            for join in self.joins:
                if join.loss == loss.number and join.pending:
                    join.enter(JoinState.FAILED)

    def taken_nodes(self) -> set[str]:
        """Return the nodes that a person has taken out of the job."""
        return {loss.slot.node for loss in self.losses if loss.cause is LossCause.TAKEN_OUT}

    def lost_nodes(self) -> set[str]:
        """Nodes that are left, and for which no other one has been found yet."""
        return {
            loss.slot.node
            for loss in self.losses
            if loss.cause.blames_node and loss.pending and loss.without_node
        }

    def faulty_nodes(self) -> dict[str, str]:
        """Return the nodes that were lost by a fault and not replaced, with the reason."""
        return {
            loss.slot.node: loss.reason
            for loss in self.losses
            if loss.cause.blames_node and loss.pending and loss.reason != TAKEN_FOR_SPARE
        }

    def evacuated_nodes(self) -> dict[str, str]:
        """Return the nodes that were left though they work, and not replaced, with the reason."""
        marked = [loss for loss in self.losses if loss.cause is LossCause.NODE_MARKED]
        return {
            loss.slot.node: loss.reason
            for loss in marked
            if loss.pending and loss.reason != TAKEN_FOR_SPARE
        }

    def lost_seats(self, since: int = 0) -> set[int]:
        """Return the seats to be filled, or empty, that were lost in a generation or later."""
        return {
            seat for loss in self.unfilled if loss.before.generation >= since for seat in loss.seats
        }

    def join_of(self, step: int) -> JoinAttempt:
        """Return the join step of this number."""
        return next(join for join in self.joins if join.step == step)
