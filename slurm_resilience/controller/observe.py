"""Observe: one frozen picture of Slurm, the agents, the journal and the runs; or `Blind`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.controller.inbox import AgentView, Inbox
from slurm_resilience.controller.journal import Incident, Journal, PendingRequeue, Supervised
from slurm_resilience.controller.probe import Prober, ProbeResult
from slurm_resilience.errors import SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.replace import program
from slurm_resilience.replace.program import Run
from slurm_resilience.slurm.client import SlurmClient


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """Everything one cycle decides from."""

    now: float
    """Seconds since the epoch."""
    moment: float
    """The same as a moment of the monotonic clock; probes and beats are compared with it."""
    uptime: float
    """Seconds since sresctld started to listen."""
    nodes: dict[str, Node]
    jobs: dict[int, Job]
    agents: dict[str, AgentView] = {}
    probes: dict[str, tuple[ProbeResult, ...]] = {}
    incidents: dict[str, Incident] = {}
    """The open incident of each node that has one."""
    gave_up: dict[str, Incident] = {}
    settled: dict[str, float] = {}
    """When each node's last incident ended (epoch): older findings are dealt with."""
    runs: dict[int, Run] = {}
    """Replacement runs by incident id: the latest attempt."""
    supervised: dict[int, Supervised] = {}
    chases: dict[int, PendingRequeue] = {}
    paused: str = ""
    can_replace: bool = False
    """A replacement program is configured."""
    permits_expansion: bool = False


class Blind(msgspec.Struct, frozen=True):
    """Slurm could not be read: nobody is judged, nothing is done."""

    reason: str


def run_directory(state_dir: Path, incident: Incident, attempt: int | None = None) -> Path:
    """Where the replacement program's run of an incident lives."""
    number = incident.attempts if attempt is None else attempt
    return state_dir / "runs" / f"{incident.id}-{number}"


def last_run(state_dir: Path) -> int:
    """The highest incident that has a run's directory. A new journal must not number from 1 again:
    an old run would be taken for the new incident's, and the program not be started."""
    numbers = [path.name.partition("-")[0] for path in (state_dir / "runs").glob("*-*")]
    return max((int(text) for text in numbers if text.isascii() and text.isdigit()), default=0)


def observe(
    client: SlurmClient,
    board: Inbox,
    prober: Prober,
    journal: Journal,
    clock: Clock,
    *,
    started: float,
    state_dir: Path,
    can_replace: bool,
    permits_expansion: bool,
) -> ClusterSnapshot | Blind:
    """Read the world.

    Args:
        started: moment of the monotonic clock at which sresctld began to listen.
        state_dir: sresctld's own directory (runs of the replacement program).
    """
    try:
        nodes = client.nodes()
        jobs = client.jobs()
    except SresError as error:
        return Blind(str(error))
    if not nodes:
        return Blind("Slurm listed no node at all")
    incidents = {incident.node: incident for incident in journal.incidents()}
    return ClusterSnapshot(
        now=clock.now(),
        moment=clock.monotonic(),
        uptime=clock.monotonic() - started,
        nodes={node.name: node for node in nodes},
        jobs={job.id: job for job in jobs},
        agents=board.agents(),
        probes=prober.results(),
        incidents=incidents,
        gave_up={incident.node: incident for incident in journal.gave_up()},
        settled=journal.settled(),
        runs={
            incident.id: program.status(run_directory(state_dir, incident))
            for incident in incidents.values()
            if incident.state == "replacing"
        },
        supervised=journal.supervised(),
        chases=journal.chases(),
        paused=journal.paused,
        can_replace=can_replace,
        permits_expansion=permits_expansion,
    )
