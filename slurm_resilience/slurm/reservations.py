"""Slurm's reservations: read, made, changed and deleted through its commands.

A reservation of ours is an ordinary one (no `MAINT`): its nodes look idle, are checked like any
other, and take the jobs of its users alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slurm_resilience.clock import seconds_of
from slurm_resilience.errors import NotFound, SlurmError
from slurm_resilience.model import Job
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.hostlists import expand, fold
from slurm_resilience.slurm.parse import REQUEST_FORMAT, node_requests

_TERMS = (
    "StartTime", "EndTime", "Duration", "Features", "PartitionName", "Flags", "Users", "Groups",
    "Accounts", "Licenses", "BurstBuffer",
)  # fmt: skip
"""Fields that only a person's `scontrol update` changes."""
_GONE = re.compile(r"Requested reservation is invalid|not found|Invalid reservation", re.IGNORECASE)


class Reservation(NamedTuple):
    """One line of `scontrol show reservation`."""

    name: str
    nodes: tuple[str, ...]
    starts_at: float
    """Seconds since the epoch; 0 where it cannot be read."""
    terms: str = ""
    """Its times, users, flags and the like, as text."""


class ReservationClient(Protocol):
    """Slurm's reservations, as sresctld needs them for spare nodes; errors as of `SlurmClient`."""

    def reservations(self) -> tuple[Reservation, ...]:
        """Return all reservations that are under way or planned."""
        ...

    def keep_nodes(self, name: str, nodes: Sequence[str], user: str) -> None:
        """Make a reservation without an end, whose nodes take one user's jobs alone.

        Slurm refuses nodes on which a job runs.
        """
        ...

    def give_nodes(self, name: str, nodes: Sequence[str], user: str) -> None:
        """Make a reservation over others, and over the jobs that run there, for one user's jobs
        that ask for it by name."""
        ...

    def put_job_in(self, job_id: int, name: str) -> None:
        """Have a pending job start in a reservation, or in none; a running one leave it."""
        ...

    def exchange_requests(self, job: Job, nodes: int) -> tuple[int, ...]:
        """Return the pending requests of a job that lost so many nodes: for an exchange, or for a
        companion."""
        ...

    def jobs(self) -> tuple[Job, ...]:
        """Jobs that are not finished."""
        ...

    def change_nodes(self, name: str, nodes: Sequence[str]) -> None:
        """Give a reservation these nodes in the place of those that it has."""
        ...

    def delete_reservation(self, name: str) -> None:
        """Delete a reservation, if it is there."""
        ...


class ReservationCommands(CliClient):
    """`ReservationClient` over scontrol. It needs an operator's rights."""

    def reservations(self) -> tuple[Reservation, ...]:
        return read_reservations(self._run("scontrol", "show", "reservation", "-a", "-o"))

    def keep_nodes(self, name: str, nodes: Sequence[str], user: str) -> None:
        words = [f"reservationname={name}", "starttime=now", "duration=infinite"]
        words += [f"users={user}", f"nodes={fold(nodes)}"]
        self._run("scontrol", "create", "reservation", *words)

    def give_nodes(self, name: str, nodes: Sequence[str], user: str) -> None:
        words = [f"reservationname={name}", "starttime=now", "duration=infinite"]
        words += [f"users={user}", f"nodes={fold(nodes)}", "flags=overlap,ignore_jobs"]
        self._run("scontrol", "create", "reservation", *words)

    def put_job_in(self, job_id: int, name: str) -> None:
        own_name = self._own_name(job_id)
        self._run("scontrol", "update", f"jobid={own_name}", f"reservationname={name}")

    def exchange_requests(self, job: Job, nodes: int) -> tuple[int, ...]:
        squeue = ("squeue", "-a", "-h", f"--user={job.uid}")
        shown = self._run(*squeue, f"--name=sres-{job.id}", "-o", REQUEST_FORMAT)
        own = [one for one in self.companions(job) if one.restarts == job.restarts]
        if own:
            numbers = ",".join(str(one.id) for one in own)
            shown += self._run(*squeue, "-j", numbers, "-t", "PENDING", "-o", REQUEST_FORMAT)
        if not shown.strip():
            return ()
        limit = self._run("squeue", "-a", "-h", "-j", str(int(job.id)), "-o", "%l")
        return tuple(node_requests(shown, limit, nodes).raised)

    def change_nodes(self, name: str, nodes: Sequence[str]) -> None:
        self._run("scontrol", "update", f"reservationname={name}", f"nodes={fold(nodes)}")

    def delete_reservation(self, name: str) -> None:
        try:
            self._run("scontrol", "delete", f"reservationname={name}")
        except NotFound:
            return
        except SlurmError as error:
            if not _GONE.search(str(error)):
                raise


def read_reservations(text: str) -> tuple[Reservation, ...]:
    """Return the reservations that `scontrol show reservation -o` prints."""
    found = []
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if not fields.get("ReservationName"):
            continue
        nodes = fields.get("Nodes", "")
        try:
            starts_at = seconds_of(fields.get("StartTime", ""))
        except ValueError:
            starts_at = 0.0
        names = expand(nodes) if nodes and nodes != "(null)" else ()
        terms = " ".join(f"{key}={fields[key]}" for key in _TERMS if key in fields)
        found.append(Reservation(fields["ReservationName"], names, starts_at, terms))
    return tuple(found)


def is_over(terms: str, now: float) -> bool:
    """Tell whether a reservation's time has ended: what Slurm calls infinite is a year."""
    ends = re.search(r"EndTime=(\S+)", terms)
    try:
        return ends is not None and seconds_of(ends[1]) <= now
    except ValueError:
        return False
