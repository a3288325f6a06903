"""Keep nodes free for work of our own: reservations, and steps within them.

Slurm could remove a reservation by itself once no job has run in it for a while (`PURGE_COMP`). On
22.05 its nodes stay in the state MAINT then, until any other reservation is made or deleted.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from slurm_resilience.child_group import end_with_parent
from slurm_resilience.clock import seconds_of
from slurm_resilience.slurm.cli import CliClient, environment
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.slurm.reservations import Reservation, read_reservations

JOB_NAME = "sres-deepcheck"


class StepOrder(NamedTuple):
    """A job of one step over all of its nodes."""

    reservation: str
    nodes: tuple[str, ...]
    program: tuple[str, ...]
    minutes: int
    tasks_per_node: int = 1
    gres: str = ""
    secrets: tuple[tuple[str, str], ...] = ()
    """Variables of the program. A command line is seen by every user of a node; these are not."""


class MaintenanceClient(CliClient):
    """`CliClient` with what needs an operator's rights and changes no node's state."""

    def reservations(self) -> tuple[Reservation, ...]:
        """Return all reservations that are under way or planned."""
        return read_reservations(self._run("scontrol", "show", "reservation", "-a", "-o"))

    def waiting_partitions(self) -> frozenset[str]:
        """Return the partitions in which jobs wait for nodes."""
        return read_waiting(self._run("squeue", "-h", "-a", "-t", "PENDING", "-o", "%P|%r"))

    def busy_until(self) -> dict[str, float]:
        """Return when each node last ran a job, in seconds since the epoch."""
        return read_busy(self._run("scontrol", "show", "node", "-o"))

    def reserve(self, name: str, nodes: Sequence[str], minutes: int, user: str) -> None:
        """Keep nodes for a user's jobs.

        Raises:
            SlurmError: a job has begun on one of them meanwhile.
            NotPermitted: this needs an operator's rights.
        """
        words = [f"reservationname={name}", "starttime=now", f"duration={minutes}"]
        words += [f"users={user}", f"nodes={fold(nodes)}", "flags=maint"]
        self._run("scontrol", "create", "reservation", *words)

    def release(self, name: str) -> None:
        """Remove a reservation; Slurm refuses while a job still ends in it."""
        self._run("scontrol", "delete", f"reservationname={name}")

    def cancel_jobs_in(self, reservation: str) -> None:
        """End all jobs of a reservation."""
        self._run("scancel", f"--reservation={reservation}", f"--name={JOB_NAME}")

    def start_step(self, order: StepOrder) -> subprocess.Popen[str]:
        """Start a job; its step's output comes through the process, which dies with this thread."""
        return subprocess.Popen(
            [self._path("srun"), *step_words(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment() | dict(order.secrets),
            # Ctrl-C is for the caller, which ends the job in order.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def step_words(order: StepOrder) -> list[str]:
    """Return srun's words for a job."""
    words = [f"--reservation={order.reservation}", f"--nodelist={fold(order.nodes)}"]
    words += [f"--nodes={len(order.nodes)}", f"--ntasks-per-node={order.tasks_per_node}"]
    words += ["--exclusive", "--mem=0", "--cpu-bind=none"]
    # A node that dies under the load ends neither the job nor the step of the others.
    words += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    words += [f"--job-name={JOB_NAME}", f"--time={order.minutes}", "--chdir=/", "--quiet"]
    words += [f"--gres={order.gres}"] if order.gres else []
    words += ["--export=ALL"] if order.secrets else []
    return [*words, *order.program]


_WAITS_FOR_NODES = re.compile(r"None|Resources|Priority|ReqNodeNotAvail|Reserv|Nodes? ")
"""The beginnings of the reasons of jobs that could run if there were more idle nodes. (Others wait
for a person, a date, a limit or another job.)"""


def read_waiting(text: str) -> frozenset[str]:
    """Return the partitions of the jobs that wait for nodes.

    Args:
        text: of each pending job its partitions and its reason, as squeue prints them.
    """
    rows = (line.strip().partition("|") for line in text.splitlines())
    waiting = [partitions for partitions, _, reason in rows if _WAITS_FOR_NODES.match(reason)]
    return frozenset(name for partitions in waiting for name in partitions.split(","))


_BUSY = re.compile(r"^NodeName=(?P<node>\S+) .*?\bLastBusyTime=(?P<at>\S+)", re.MULTILINE)


def read_busy(text: str) -> dict[str, float]:
    """Return when each node last ran a job; one that has run none since slurmctld knows it is left
    out.

    Args:
        text: of scontrol, a node a line.
    """
    found = {}
    for match in _BUSY.finditer(text):
        with contextlib.suppress(ValueError):
            found[match["node"]] = seconds_of(match["at"])
    return found
