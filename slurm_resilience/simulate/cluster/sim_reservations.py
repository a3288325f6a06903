"""Reservations of a simulated Slurm: sresctld's for spare nodes, and what people do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from slurm_resilience.errors import SlurmError, SlurmUnreachable
from slurm_resilience.simulate.cluster.sim_slurm import SRESCTLD, SimSlurm
from slurm_resilience.slurm.reservations import Reservation


class ReservationWatcher(Protocol):
    """Is told of each change of a reservation, and by whom."""

    def reservation_set(
        self, name: str, before: Reservation | None, after: Reservation | None, author: str
    ) -> None:
        """Take in that a reservation was made, changed or deleted."""
        ...

    def reservations_read(self) -> None:
        """Take in that sresctld reads all of them."""
        ...

    def look(self, is_able: bool, seconds: float) -> None:
        """Check what must come about in time."""
        ...

    def resumed(self) -> None:
        """Take in that a person lets sresctld go on with what people have changed."""
        ...


class SimReservations:
    """A `ReservationClient` for sresctld, and the rest of it for the simulated world."""

    def __init__(self, slurm: SimSlurm, now: Callable[[], float]) -> None:
        self._slurm = slurm
        self._now = now
        self.shown: dict[str, Reservation] = {}
        self.refuses = False
        """Slurm refuses all that is asked of it here."""
        self.answers_get_lost = False
        """Slurm does what it is asked for, and its answer does not arrive."""
        self.watcher: ReservationWatcher
        slurm.reserved = self.nodes

    def nodes(self) -> set[str]:
        """Return the nodes of all reservations."""
        return {name for one in self.shown.values() for name in one.nodes}

    def set_by(self, author: str, name: str, nodes: Sequence[str], terms: str = "") -> None:
        """Make or change one as `scontrol` does.

        Raises:
            SlurmError: a job runs on one of the nodes, or another reservation has it.
        """
        before = self.shown.get(name)
        added = set(nodes) - set(before.nodes if before else ())
        others = {n for one in self.shown.values() if one.name != name for n in one.nodes}
        if not nodes or added & others:
            raise SlurmError("Requested reservation overlaps with another reservation")
        if any(job.state != "PENDING" for node in added for job in self._slurm.jobs_on(node)):
            raise SlurmError("Requested nodes are busy")
        starts_at = before.starts_at if before else self._now()
        own_terms = terms or (before.terms if before else f"StartTime={starts_at} Users=root")
        self._put(author, name, Reservation(name, tuple(sorted(nodes)), starts_at, own_terms))

    def delete_by(self, author: str, name: str) -> None:
        """Delete one, if it is there."""
        if name in self.shown:
            self._put(author, name, None)
            self._slurm.fill()

    def _put(self, author: str, name: str, after: Reservation | None) -> None:
        before = self.shown.get(name)
        if after is None:
            del self.shown[name]
        else:
            self.shown[name] = after
        self.watcher.reservation_set(name, before, after, author)

    # -- ReservationClient ----------------------------------------------------------------------

    def reservations(self) -> tuple[Reservation, ...]:
        self.watcher.reservations_read()
        self._slurm.enter()
        return tuple(self.shown.values())

    def keep_nodes(self, name: str, nodes: Sequence[str], user: str) -> None:
        self._enter()
        if name in self.shown:
            raise SlurmError("Duplicate reservation name")
        self.set_by(SRESCTLD, name, nodes)
        self._leave()

    def change_nodes(self, name: str, nodes: Sequence[str]) -> None:
        self._enter()
        if name not in self.shown:
            raise SlurmError("Requested reservation is invalid")
        self.set_by(SRESCTLD, name, nodes)
        self._slurm.fill()
        self._leave()

    def delete_reservation(self, name: str) -> None:
        self._enter()
        self.delete_by(SRESCTLD, name)
        self._leave()

    def _enter(self) -> None:
        self._slurm.enter()
        if self.refuses:
            raise SlurmError("Access/permission denied")

    def _leave(self) -> None:
        if self.answers_get_lost:
            raise SlurmUnreachable("Socket timed out on send/recv operation")
