"""What the supervisor works with, in one place."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.report import EventLog
from slurm_resilience.resume.srun.command import AttemptCommand
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.slurm.client import SlurmClient


@dataclass(frozen=True)
class Context:
    """One supervised srun's."""

    limits: ResumeSettings
    client: SlurmClient
    allocation: Allocation
    link: SupervisorLink
    launch: AttemptCommand
    command: SrunCommand
    """The user's."""
    environment: Mapping[str, str]
    """The supervisor's own."""
    person: UserSignals
    wake: threading.Event
    """Set when there is news of any kind."""
    events: EventLog
    host: str
    """This machine's name as Slurm shows it at a step (`SrunHost:Pid`)."""

    def interrupted(self, step: SrunStep, stopped: bool) -> str:
        """The person's signal that ended this step, if there is one.

        Args:
            stopped: the supervisor ended it.
        """
        quick = self.command.has("quit-on-interrupt") or self.command.has("disable-status")
        return self.person.interrupted(step, stopped, quick)
