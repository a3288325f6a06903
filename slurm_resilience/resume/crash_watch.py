"""Notice that a task of a step crashed, so that the others need not wait for it in vain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import Enum
from signal import SIGKILL

from slurm_resilience.errors import SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.classify import describe_end
from slurm_resilience.resume.decide.task_ends import TaskEnd, first_failure
from slurm_resilience.resume.srun.stderr_reader import code_of
from slurm_resilience.resume.srun.step import find_step
from slurm_resilience.resume.srun.step_set import StepSet

LOST_CODE = 128 + SIGKILL
"""Stands for the end of the tasks on a node that Slurm gave up."""
CRASH_SECONDS = 0.5
"""From a task's crash to the end of the others. A step that is being cancelled says so by then."""


class GatheringStage(Enum):
    """The progress of a program that may re-form its own world."""

    UNKNOWN = "nothing was heard of it"
    GATHERS = "some of its processes wait for the others"
    STEPS = "they step together, and go on without one that is lost"
    OVER = "they have ended their training well, and need each other no more"


class CrashWatch:
    """Looks at the ends of one step's tasks; asks the others to end after a crash."""

    def __init__(
        self,
        context: SupervisorContext,
        step: StepSet,
        *,
        lives: bool,
        training: Callable[[], GatheringStage] = lambda: GatheringStage.STEPS,
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            step: its sruns.
            lives: the step is to go on without a task or a node.
            training: tells how far the tasks of such a step are: until they step together, the
                others would wait for a lost one for ever. After it they may have much to do.
        """
        self._context = context
        self._step = step
        self._lives = lives
        self._training = training
        self._others_go_on = _others_go_on(context)
        self._on = lives or not self._others_go_on
        self._seen: float | None = None
        self._asked: float | None = None
        self.crash: TaskEnd | None = None
        """The one for which the others were asked to end."""
        self.noticed = 0.0
        """Seconds since the epoch: when that was."""

    def pause(self, longest: float) -> float:
        """Return how long the caller may wait for news."""
        if self._asked is not None:
            due = self._asked + self._context.limits.grace
        elif self._seen is not None:
            due = self._seen + CRASH_SECONDS
        else:
            return longest
        return min(longest, max(0.0, due - self._context.clock.monotonic()))

    def look(self) -> bool:
        """Ask the other tasks to end if one crashed; True: they had their time, and still run.

        The caller goes on watching: a lost node may have made that task crash.
        """
        now = self._context.clock.monotonic()
        if self._asked is not None:
            return now - self._asked >= self._context.limits.grace
        crash = self._find() if self._on else None
        if crash is None:
            return False
        if self._seen is None:
            self._seen = now
        if now - self._seen < CRASH_SECONDS:
            return False
        self._seen = None
        if self._step.aborted and not self._step.cancelled:
            # The step ends soon, or an srun of the program's own has said so: while its words may
            # be meant for this step, the next look decides.
            return False
        self._on = False
        # Slurm or a person is ending the step already.
        ending = self._step.cancelled or not self._step.running
        if ending or self._context.user_ended(self._step.main, stopped_by_us=False):
            return False
        report.say(f"{describe_end(crash)}: ending the other tasks")
        self.crash, self._asked, self.noticed = crash, now, self._context.clock.now()
        self._ask()
        return False

    def _find(self) -> TaskEnd | None:
        if not self._lives:
            return self._step.reports.crash()
        stage = self._training()
        lost_nodes = tuple(self._step.failed_nodes)
        others_go_on = stage is GatheringStage.OVER and not lost_nodes
        if others_go_on or stage is GatheringStage.STEPS:
            return None
        ends = tuple(self._step.ended_tasks)  # a copy: it grows in another thread
        if stage is GatheringStage.UNKNOWN and not lost_nodes:
            # Nothing says yet that its tasks need each other: as with any other program.
            return None if self._others_go_on else self._step.reports.crash()
        known = first_failure(self._step.reports.ends())
        if known is not None or not (ends or lost_nodes):
            return known
        # Without the plugin: in srun's words.
        if ends:
            nodes, tasks, how = ends[0]
            return TaskEnd(0, 0, tasks[0], code_of(how), node=nodes[0])
        return TaskEnd(0, 0, 0, LOST_CODE, by_signal=True, node=min(lost_nodes))

    def _ask(self) -> None:
        context = self._context
        for part in self._step.parts:
            job = part.job or context.allocation.id
            info = find_step(part, context.client, job, context.host)
            if info is not None:
                part.ends_by_us(killed=False)
                # What does not end by it is ended after the grace.
                with contextlib.suppress(SresError):
                    context.client.cancel_step(job, info.step, "TERM")


def _others_go_on(context: SupervisorContext) -> bool:
    """Return whether the user has said for how long the other tasks may go on."""
    command, environment = context.command, context.environment
    if command.has("wait") or environment.get("SLURM_WAIT"):
        return True
    if command.has("kill-on-bad-exit"):
        return command.value("kill-on-bad-exit") == "0"
    return environment.get("SLURM_KILL_BAD_EXIT") == "0"
