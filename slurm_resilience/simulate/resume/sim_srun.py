"""An srun of the simulation: the real `SrunStep`, whose process is simulated."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurm_resilience.resume.srun import env_option
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.simulate.cluster.sim_clock import BOOTED_SECONDS
from slurm_resilience.slurm.hostlists import expand

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld


class SimSrunProcess:
    """The part of `subprocess.Popen` that `SrunStep` uses."""

    def __init__(self, pid: int, world: ResumeWorld, srun: SimSrun) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._world, self._srun = world, srun

    def send_signal(self, number: int) -> None:
        """Take a signal."""
        self._world.step_life.srun_signalled(self._srun, number)


class NoLog:
    """A job's log that names no cause."""

    def explain(self) -> None:
        return None


class SimSrun(SrunStep):
    """One srun. What it prints is read by the real code."""

    def __init__(self, world: ResumeWorld, *arguments: Any, **options: Any) -> None:
        self._world = world
        self.wanted: tuple[str, ...] = ()
        """The nodes that it asks for."""
        self.variables: dict[str, str] = {}
        self.interrupted_at = float("-inf")
        self.allocation = 0
        """The job that its step runs in."""
        self.ntasks = 0
        """--ntasks; 0: not given."""
        self.words: frozenset[str] = frozenset()
        """Those of its command line."""
        self.ordered_at = float("inf")
        """When the supervisor first ordered its end."""
        self.gave_up = False
        """slurmctld did not answer it."""
        self.closed: set[str] = set()
        """Addresses to which the supervisor has closed its connections."""
        super().__init__(*arguments, **options)
        self.log: Any = NoLog()

    @property
    def token(self) -> str:
        return self.variables["SRES_TOKEN"]

    @property
    def world(self) -> tuple[str, ...]:
        """Return the nodes of the whole attempt, of which it may have a part."""
        listed = self.variables.get("SLURM_STEP_NODELIST", "")
        return expand(listed) if listed else self.wanted

    @property
    def is_companion(self) -> bool:
        return self.allocation != self._world.job.id

    @property
    def is_join(self) -> bool:
        return self.variables.get("SRES_STEP", "0") != "0"

    @property
    def killed_by_supervisor(self) -> bool:
        return self._by_us.killed_srun

    @property
    def overlaps(self) -> bool:
        return "--overlap" in self.words

    @property
    def keeps_running(self) -> bool:
        """Return whether the loss of a node or a task does not end it."""
        return "--no-kill" in self.words

    @property
    def ordered_to_end(self) -> bool:
        """Return whether the supervisor has ordered its end."""
        return self.ordered_at < float("inf")

    def order_to_end(self) -> None:
        """Note that the supervisor has ordered its end."""
        self.ordered_at = min(self.ordered_at, self._world.schedule.now)

    @property
    def began_at(self) -> float:
        """Return when it was started."""
        return self.started - BOOTED_SECONDS

    @property
    def gone_at(self) -> float:
        """Return when it ended; infinite: it runs."""
        return float("inf") if self.running else self.ended_at - BOOTED_SECONDS

    @property
    def end_began_at(self) -> float:
        """Return when the supervisor ordered its end, or when it ended by itself, if not before."""
        return min(self.ordered_at, self.gone_at)

    def ends_by_us(self, *, killed: bool) -> None:
        self.order_to_end()
        super().ends_by_us(killed=killed)

    def _launch(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None,
        has_terminal: bool,
    ) -> Any:
        count, self.words = 0, frozenset(argv[1:])
        for word in argv[1:]:
            name, _, value = word.partition("=")
            if name == env_option.OPTION:
                self.variables = env_option.read_option_value(value)
            elif name == "--nodelist":
                self.wanted = expand(value)
            elif name == "--jobid":
                self.allocation = int(value)
            elif name == "--ntasks":
                self.ntasks = int(value)
            elif name == "--nodes" or word.startswith("-N"):
                count = int(value or word[2:])
        self.allocation = self.allocation or self._world.job.id
        self.wanted = self.wanted or self._world.job.nodes[: count or None]
        process = SimSrunProcess(self._world.next_pid(), self._world, self)
        self._world.srun_started(self)
        return process

    def says(self, text: str) -> None:
        """Print a line."""
        if self.running and self._stderr.read(f"{text}\n".encode(), self.clock.monotonic()):
            self._on_news()

    def ends(self, returncode: int) -> None:
        """End with a code, or by a signal (a negative one)."""
        if self.running:
            self._process.returncode = returncode
            self.ended_at = self.clock.monotonic()
            self._on_end()

    def wait(self, seconds: float) -> bool:
        """Let time pass until it has ended."""
        self._world.pass_time(seconds, lambda: not self.running)
        return not self.running


ENDED_BY = {
    signal.SIGKILL: "Killed",
    signal.SIGTERM: "Terminated",
    signal.SIGSEGV: "Segmentation fault",
    signal.SIGINT: "Interrupt",
}
"""srun's words for the end of a task by a signal."""


def words_of_end(code: int) -> str:
    """Return srun's words for a task's exit code, as a shell shows it."""
    if code > 128:
        return ENDED_BY[signal.Signals(code - 128)]
    return f"Exited with exit code {code}"
