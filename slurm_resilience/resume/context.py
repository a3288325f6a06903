"""The collaborators and settings that all parts of one supervisor share."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.report import EventLog
from slurm_resilience.resume.srun.command import AttemptCommand
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.resume.srun.quiet_lines import quietness
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.standard_input import StandardInput
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.task_reports import TaskReports
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.resume.task_labels import TaskNumbers
from slurm_resilience.slurm.client import SlurmClient


class SupervisorContext(msgspec.Struct, frozen=True):
    """Collaborators and settings of one supervised srun."""

    clock: Clock
    limits: ResumeSettings
    client: SlurmClient
    allocation: Allocation
    link: SupervisorLink
    launch: AttemptCommand
    command: SrunCommand
    """The user's."""
    environment: Mapping[str, str]
    """The supervisor's own."""
    user_signals: UserSignals
    wake: threading.Event
    """Set when there is news of any kind."""
    events: EventLog
    standard_input: StandardInput
    host: str
    """This machine's name as Slurm shows it at a step (`SrunHost:Pid`)."""
    reports: TaskReports = msgspec.field(default_factory=TaskReports)
    """The words of slurmstepd on the tasks."""
    host_calls: HostCalls = msgspec.field(default_factory=HostCalls)

    @property
    def quiet(self) -> int:
        """Return how often the user said --quiet."""
        return quietness(self.command)

    def start_join(
        self, argv: Sequence[str], environment: dict[str, str], numbers: TaskNumbers | None
    ) -> SrunStep:
        """Start the srun of a step that joins one which lives.

        Args:
            argv: of srun.
            environment: of srun.
            numbers: of its tasks among all, where srun labels their lines.

        Raises:
            SlurmUnreachable: srun cannot be started now.
            MissingTool: it cannot be started at all.
        """
        return self.host_calls.start_srun(
            argv,
            environment,
            self.wake.set,
            on_news=self.wake.set,
            clock=self.clock,
            numbers=numbers,
            quiet=self.quiet,
        )

    def user_ended(self, step: SrunStep, stopped_by_us: bool) -> str:
        """Return the name of the user's signal that ended this step; empty: none did.

        Args:
            step: it has ended, or is asked about early.
            stopped_by_us: the supervisor ended it.
        """
        quick = self.command.has("quit-on-interrupt") or self.command.has("disable-status")
        return self.user_signals.ended(step, stopped_by_us, quick)

    def wait_for_news(self, seconds: float) -> bool:
        """Wait until there is news, or the time is over; True: there is news."""
        news = self.clock.wait(self.wake, seconds)
        self.wake.clear()
        return news
