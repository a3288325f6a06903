"""What a living step has lost, and what was seen of each seat before."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_resilience.mesh.observer import Picture
from slurm_resilience.resume import report
from slurm_resilience.resume.live_step.join_step import EmptySeats
from slurm_resilience.slurm.hostlists import fold


@dataclass(eq=False)
class SeatLoss:
    """Seats of one node that are to be filled again."""

    slot: EmptySeats
    """As it was."""
    seats: tuple[int, ...]
    reason: str
    noticed: float
    """Seconds since the epoch, as all others here; 0: not yet."""
    dead: bool
    peers: frozenset[str]
    """Ids of the processes that are gone."""
    generation: int
    """The last one that they were in."""
    step: int = -1
    """The newest one before."""
    at_fault: bool = True
    """The node is; else only its tasks died."""
    due: float = 0.0
    """Monotonic: when it is acted on."""
    hunted: bool = False
    node: str = ""
    """The one that takes the seats over."""
    went_on: float = 0.0
    nodes_ready: float = 0.0
    started: float = 0.0


@dataclass
class SeatHistory:
    """What was seen of each seat so far."""

    peers: dict[int, set[str]] = field(default_factory=dict)
    generation: dict[int, int] = field(default_factory=dict)
    incarnation: dict[int, int] = field(default_factory=dict)
    step: int = -1

    def look(self, picture: Picture) -> None:
        self.step = max(self.step, picture.step)
        for peer in picture.peers:
            self.peers.setdefault(peer.seat, set()).add(peer.id)
            known = self.incarnation.get(peer.seat, 0)
            self.incarnation[peer.seat] = max(known, peer.incarnation)
        for seat in picture.running:
            self.generation[seat] = picture.generation

    def ids(self, seats: Iterable[int]) -> frozenset[str]:
        """Every process that was seen on these seats."""
        return frozenset(name for seat in seats for name in self.peers.get(seat, ()))

    def loss(
        self, slot: EmptySeats, seats: tuple[int, ...], reason: str, *, dead: bool
    ) -> SeatLoss:
        """These seats are lost now."""
        generation = max((self.generation.get(seat, 0) for seat in seats), default=0)
        return SeatLoss(
            slot, seats, reason, time.time(), dead, self.ids(seats), generation, self.step
        )


def tell(loss: SeatLoss, nodes: tuple[str, ...], step: int) -> None:
    """The block in the job's log when seats are filled again.

    Args:
        nodes: where the training runs now.
        step: its last one.
    """
    seats = ",".join(map(str, loss.seats))
    if loss.at_fault:
        done = f"{loss.slot.node} exchanged for {loss.node}, which joined as seats {seats}"
    else:
        done = f"seats {seats} were started again on {loss.node}; no node is at fault"
    report.healed(
        report.HealingLine(
            what=f"{loss.slot.node}: {loss.reason}",
            done=f"{done}; now on {fold(nodes)}",
            seats=loss.seats,
            noticed=loss.noticed,
            went_on=loss.went_on,
            nodes_ready=loss.nodes_ready,
            started=loss.started,
            joined=time.time(),
            step=step,
            before=loss.step,
        )
    )
