"""A supervisor of `srun -N2 train` on a `FakeSlurm`, and its watch over an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fake_slurm import FakeSlurm

from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.model import Job
from slurm_resilience.resume.attempt_watch import AttemptWatch
from slurm_resilience.resume.first_step import plan_attempt
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.supervisor import Supervisor
from slurm_resilience.resume.supervisor_link import SupervisorLink


def supervisor_of(
    slurm: FakeSlurm,
    job: Job | None = None,
    *,
    config: Config | None = None,
    environment: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    has_plugin: bool = True,
) -> Supervisor:
    """Return a supervisor that has started nothing yet.

    Args:
        slurm: has the job.
        job: of two nodes; None: number 1.
        config: all settings; None: the defaults.
        environment: more of the supervisor's own.
        clock: the time; None: the machine's.
        has_plugin: srun carries the plugin.
    """
    return Supervisor(
        config or Config(),
        slurm,
        SupervisorLink(("localhost",), 1, 1, "", frozenset({0})),
        "/usr/bin/srun",
        split(["-N2", "train"], BUILTIN),
        job or slurm.job(1),
        has_plugin=has_plugin,
        permits_expansion=True,
        environment={"SLURM_NNODES": "2"} | dict(environment or {}),
        clock=clock,
    )


def watch_of(supervisor: Supervisor, step: Any) -> AttemptWatch:
    """Return the watch over a supervisor's first attempt.

    Args:
        supervisor: has started none.
        step: the attempt's, or what the test needs of it.
    """
    planned = plan_attempt(supervisor._context, 1, 0, ("n1", "n2"), "")
    return supervisor._watch_over(planned, step, None)
