"""What the supervisor works with, in one place."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.allocation import Allocation
from slurm_resilience.resume.launch import Launch
from slurm_resilience.resume.link import Link
from slurm_resilience.resume.person import Person
from slurm_resilience.resume.report import EventLog
from slurm_resilience.resume.srun_options import SrunCommand
from slurm_resilience.resume.step import Step
from slurm_resilience.slurm.client import SlurmClient


@dataclass(frozen=True)
class Means:
    """One supervised srun's."""

    limits: ResumeSettings
    client: SlurmClient
    allocation: Allocation
    link: Link
    launch: Launch
    command: SrunCommand
    """The user's."""
    environment: Mapping[str, str]
    """The supervisor's own."""
    person: Person
    wake: threading.Event
    """Set when there is news of any kind."""
    events: EventLog
    host: str
    """This machine's name as Slurm shows it at a step (`SrunHost:Pid`)."""

    def interrupted(self, step: Step, stopped: bool) -> str:
        """The person's signal that ended this step, if there is one.

        Args:
            stopped: the supervisor ended it.
        """
        quick = self.command.has("quit-on-interrupt") or self.command.has("disable-status")
        return self.person.interrupted(step, stopped, quick)
