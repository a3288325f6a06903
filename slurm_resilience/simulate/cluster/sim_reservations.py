"""Reservations of a simulated Slurm: sresctld's for spare nodes, and what people do to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from slurm_resilience.errors import SlurmError, SlurmUnreachable
from slurm_resilience.model import Job
from slurm_resilience.simulate.cluster.sim_slurm import SRESCTLD, SimSlurm
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.slurm.reservations import Reservation


class ReservationWatcher(Protocol):
    """Is told of each change of a reservation, and by whom."""

    def reservation_set(
        self, name: str, before: Reservation | None, after: Reservation | None, author: str
    ) -> None:
        """Take in that a reservation was made, changed or deleted."""
        ...

    def job_put_in(self, job_id: int, name: str) -> None:
        """Take in that sresctld tells a job of a reservation, or takes it out of its one."""
        ...

    def reservations_read(self) -> None:
        """Take in that sresctld reads all of them."""
        ...

    def reservations_forgotten(self, names: Collection[str]) -> None:
        """Take in that sresctld has ended, and cannot know that Slurm has made these."""
        ...

    def reservations_known(self, names: Collection[str]) -> None:
        """Take in that Slurm has shown these to sresctld, or has said that it has made them."""
        ...

    def look(self, is_able: bool, seconds: float) -> None:
        """Check what must come about in time."""
        ...

    def resumed(self) -> None:
        """Take in that a person lets sresctld go on with what people have changed."""
        ...


class SimReservations:
    """A `ReservationClient` for sresctld, and the rest of it for the simulated world."""

    def __init__(self, slurm: SimSlurm, schedule: Schedule) -> None:
        self._slurm = slurm
        self._schedule = schedule
        self.shown: dict[str, Reservation] = {}
        self.refuses = False
        """Slurm refuses all that is asked of it here."""
        self.answers_get_lost = False
        """Slurm does what it is asked for, and its answer does not arrive."""
        self.watcher: ReservationWatcher
        slurm.may_use = self.may_use
        self.requests: dict[int, int] = {}
        """Requests for nodes in exchange, and the job that each is for."""
        self.merged: Callable[[int], None] = lambda _: None
        """Is told of each job that has got the node which it asked for."""
        self.jobs_read_at = 0.0
        """When sresctld last read the jobs, to tell one of its nodes."""
        self._over: set[str] = set()
        """Reservations that may lie over others, and over jobs."""

    def nodes(self) -> set[str]:
        """Return the nodes of all reservations."""
        return {name for one in self.shown.values() for name in one.nodes}

    def may_use(self, node: str, reservation: str) -> bool:
        """Tell whether a job that names a reservation, or none, may start on a node."""
        if reservation:
            one = self.shown.get(reservation)
            return one is not None and node in one.nodes
        return not any(node in one.nodes for one in self.shown.values())

    def ask_for_node(self, job: Job) -> None:
        """Take a supervisor's request for a node in exchange, of which it waits for a minute."""
        if job.id in self.requests.values():
            return  # it waits for one
        number = self._slurm.submit(
            1, uid=job.uid, batch=False, partition=job.partition, step=False
        )
        self.requests[number] = job.id
        self._schedule.after(60.0, self._withdraw, number)
        self._look_after(number)

    def _look_after(self, number: int) -> None:
        """Merge a request that has its node into its job."""
        request = self._slurm.find_job(number)
        taker = self._slurm.find_job(self.requests.get(number, 0))
        if request is None or number not in self.requests:
            return
        if request.state == "PENDING":
            self._schedule.after(0.5, self._look_after, number)
            return
        del self.requests[number]
        self._slurm.end_by_owner(number)
        if taker is None or self._slurm.has_gres(request):
            return  # Slurm merges no job that has GRES
        if taker.state == "RUNNING" and request.state == "RUNNING":
            for name in request.nodes:
                self._slurm.grow(taker.id, name)
            self.merged(taker.id)

    def _withdraw(self, number: int) -> None:
        if self.requests.pop(number, 0):
            self._slurm.end_by_owner(number)

    def set_by(self, author: str, name: str, nodes: Sequence[str], terms: str = "") -> None:
        """Make or change one as `scontrol` does.

        Raises:
            SlurmError: a job runs on one of the nodes, or another reservation has it.
        """
        before = self.shown.get(name)
        added = set(nodes) - set(before.nodes if before else ())
        others = {
            n
            for one in self.shown.values()
            if one.name != name and one.name not in self._over
            for n in one.nodes
        }
        if not nodes or added & others:
            raise SlurmError("Requested reservation overlaps with another reservation")
        if any(job.state != "PENDING" for node in added for job in self._slurm.jobs_on(node)):
            raise SlurmError("Requested nodes are busy")
        starts_at = before.starts_at if before else self._schedule.now
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
        self.watcher.reservations_known(self.shown)
        return tuple(self.shown.values())

    def keep_nodes(self, name: str, nodes: Sequence[str], user: str) -> None:
        self._enter()
        if name in self.shown:
            raise SlurmError("Duplicate reservation name")
        self.set_by(SRESCTLD, name, nodes)
        self._leave()
        self.watcher.reservations_known((name,))

    def give_nodes(self, name: str, nodes: Sequence[str], user: str) -> None:
        self._enter()
        if name in self.shown:
            raise SlurmError("Duplicate reservation name")
        self._over.add(name)
        terms = f"StartTime={self._schedule.now} Users={user}"
        self._put(SRESCTLD, name, Reservation(name, tuple(nodes), self._schedule.now, terms))
        self._leave()
        self.watcher.reservations_known((name,))

    def put_job_in(self, job_id: int, name: str) -> None:
        self._enter()
        if name and name not in self.shown:
            raise SlurmError("Requested reservation is invalid")
        self.watcher.job_put_in(job_id, name)
        self._slurm.put_in(job_id, name)
        self._leave()

    def exchange_requests(self, job: Job, nodes: int) -> tuple[int, ...]:
        self._slurm.enter()
        asked = (number for number, taker in self.requests.items() if taker == job.id)
        found = (self._slurm.find_job(number) for number in asked)
        return tuple(one.id for one in found if one is not None and one.state == "PENDING")

    def jobs(self) -> tuple[Job, ...]:
        found = self._slurm.jobs()
        self.jobs_read_at = self._schedule.now
        return found

    def change_nodes(self, name: str, nodes: Sequence[str]) -> None:
        self._enter()
        if name not in self.shown:
            raise SlurmError("Requested reservation is invalid")
        self.set_by(SRESCTLD, name, nodes)
        self._slurm.fill()
        self._leave()

    def delete_reservation(self, name: str) -> None:
        self._enter()
        if any(job.reservation == name for job in self._slurm.every_job()):
            raise SlurmError("Requested reservation is in use")
        self.delete_by(SRESCTLD, name)
        self._leave()

    def _enter(self) -> None:
        self._slurm.enter()
        if self.refuses:
            raise SlurmError("Access/permission denied")

    def _leave(self) -> None:
        if self.answers_get_lost:
            raise SlurmUnreachable("Socket timed out on send/recv operation")
