"""Classify why a step ended. Pure.

srun's exit code never decides (137 on Slurm 22.05 and 1 on 26.05 for the same lost node): node
states, sresctld's verdicts and what the user did come first, then the end of the task that failed
first, as slurmstepd told it. Where slurmstepd cannot tell (no plugin), srun's code stands for it.
"""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

from slurm_resilience.resume.decide.signatures import Category, Explanation, Role
from slurm_resilience.resume.decide.task_ends import TaskEnd, first_failure
from slurm_resilience.slurm.hostlists import fold

SKEW_SECONDS = 30.0
"""Clocks of nodes that differ by more are not believed."""


class ObservedSteps(msgspec.Struct, frozen=True):
    """The steps that the tasks of an attempt told, or that were seen in a file or in the log."""

    furthest: int = -1
    """The highest number; -1: none was told, or the numbers do not say how far the work is."""
    moved: int = 0
    """Changes of step that the busiest rank (or the file) told."""
    got_further: bool = False
    """It went beyond the attempts before it, as far as that can be told."""


NO_STEPS = ObservedSteps()
_HOLDS_NODES = ("RUNNING", "SUSPENDED")
"""States of a job that Slurm has not ended."""


NODES_BUSY = "Requested nodes are busy"
"""srun's words where other steps of the job have the nodes."""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of the program's steps, and of whether it began at all."""

    hang: str = ""
    """The reason for which the supervisor ended it; empty: it did not hang."""
    observed: ObservedSteps = NO_STEPS
    unanswered: bool = False
    """slurmctld did not answer srun, or srun could start no thread, so that no task has begun."""
    threadless: bool = False
    """It was the latter."""
    refused: str = ""
    """srun's words for the reason for which it got no step; empty: it had one."""
    not_launched: dict[str, str] = {}
    """Nodes on which srun could start no task, with its words for the reason; it ended the others
    for that."""
    silent: dict[str, str] = {}
    """Those of them that do not answer, with the reason."""
    taken: tuple[str, ...] = ()
    """Nodes of the step that a person has taken out of the job."""
    preempted: bool = False
    """Slurm has begun to preempt the job: it told the tasks to end, and takes the nodes when the
    job's GraceTime is over."""

    @property
    def never_began(self) -> bool:
        """Return whether not all of the program was there: it has shown nothing of itself."""
        return self.unanswered or self.was_busy or bool(self.not_launched)

    @property
    def was_busy(self) -> bool:
        """Return whether other steps had its nodes, and srun was not to wait (--immediate)."""
        return self.refused == NODES_BUSY


class Ending(StepFacts, frozen=True):
    """All that is known when srun has ended."""

    code: int
    """srun's exit code as a shell shows it (128 + n for signal n)."""
    ran_for: float
    """Seconds from start to end."""
    progressed: bool
    """The program reported a later step than the attempt before it."""
    job_state: str
    """RUNNING, COMPLETING, …; empty when Slurm no longer knows the job."""
    faulty: dict[str, str] = {}
    """The step's nodes that are down, failing or marked, with the reason."""
    interrupted: str = ""
    """The user's signal to the supervisor that ends a step (e.g. ``SIGTERM``); empty: none."""
    cancelled: bool = False
    """Slurm said that the step was cancelled, before we had it ended."""
    stopped_by_us: bool = False
    trained: bool = False
    """The training in it had ended well: what failed came after it."""
    ends: tuple[TaskEnd, ...] = ()
    """Those of the tasks, in the order in which they were told; empty: they are not known."""
    timed_out: bool = False
    """Slurm said that the step was ended at its time limit."""
    log: Explanation | None = None
    """The cause by the job's own log; None: it names none, or is not to be read."""
    ended_at: float = 0.0
    """Seconds since the epoch; 0: not known."""
    nodes: tuple[str, ...] = ()
    """The nodes of the step."""
    first_failed: str = ""
    """The only node with tasks that failed by themselves; empty: several, or not known."""

    @property
    def made_progress(self) -> bool:
        """Return whether the program got further than before, by its own report or as observed."""
        return self.progressed or self.observed.got_further

    @property
    def taken_by_slurm(self) -> bool:
        """Return whether Slurm took the job's nodes for no fault of theirs, nor of the program: it
        was preempted, or a person requeued it or took nodes out of it."""
        ended = self.job_state not in _HOLDS_NODES
        taken = self.code != 0 and (ended or bool(self.taken))
        return not self.faulty and (taken or self.preempted)

    @property
    def lasted(self) -> float:
        """Return the seconds until the first task failed, by the clock of its node: the others may
        wait for long then. All seconds where that is not known, or the clocks differ."""
        first = self.first_failure
        if first is None or not first.at or not self.ended_at:
            return self.ran_for
        after = first.at - (self.ended_at - self.ran_for)
        believed = -SKEW_SECONDS < after < self.ran_for + SKEW_SECONDS
        return max(0.1, after) if believed else self.ran_for

    @property
    def first_failure(self) -> TaskEnd | None:
        """Return the task whose end explains those of the others; None: it is not known."""
        return first_failure(self.ends)

    @property
    def own_code(self) -> int:
        """Return the code of the task that failed first; srun's own where that is not known.

        srun prints the highest one of all tasks, those included that it ended itself.
        """
        first = self.first_failure
        return first.code if first else self.code


class Cause(msgspec.Struct, frozen=True):
    """The cause of an end, with the reason in words."""

    kind: Literal["done", "user", "job_over", "node", "program"]
    reason: str
    nodes: tuple[str, ...] = ()
    """The nodes to leave, for ``node``."""
    category: Category = Category.UNKNOWN
    """The kind of cause for people; what follows depends on ``kind``."""


_OF_SLURM = ("SIGTERM", "SIGHUP")
"""Signals that Slurm sends at a job's time limit: to a batch script, and to an interactive salloc's
command. A person's Ctrl-C is neither."""


def classify(ending: Ending) -> Cause:
    """Return why the step ended."""
    if ending.code == 0 and not (ending.stopped_by_us or ending.preempted):
        return Cause("done", "the program ended well", category=Category.NONE)
    if ending.job_state not in _HOLDS_NODES:
        return _job_over(ending)
    if ending.interrupted in _OF_SLURM and ending.timed_out:
        # Slurm has signalled the script as well, and could not be asked for the job's state.
        return _job_over(ending)
    if ending.interrupted:
        return Cause("user", f"the user sent {ending.interrupted}", category=Category.USER)
    if ending.preempted:
        text = "Slurm preempts the job, and takes its nodes when its GraceTime is over"
        return Cause("job_over", text, category=Category.TRANSIENT)
    if ending.cancelled:
        if ending.timed_out:
            limit = "the step reached its time limit (srun --time)"
            return Cause("user", limit, category=Category.TIME_LIMIT)
        return Cause("user", "the step was cancelled", category=Category.USER)
    if ending.faulty:
        names = tuple(sorted(ending.faulty))
        return Cause("node", _faults(ending), names, Category.HARDWARE)
    if ending.taken and not ending.trained:
        text = f"{fold(ending.taken)} was taken out of the job by a person (scontrol update)"
        return Cause("program", text, category=Category.USER)
    without_step = _without_step(ending)
    if without_step is not None:
        return without_step
    if ending.hang:
        # Nothing of the tasks' ends tells more: they were ended for it.
        return Cause("program", ending.hang, category=Category.TRANSIENT)
    if ending.trained:
        # Another attempt would train once more.
        text = f"the training had ended well; what came after it: {describe(ending.code)}"
        return Cause("done", text)
    return _program(ending)


def _without_step(ending: Ending) -> Cause | None:
    """Return why not all of the program began; None: it did."""
    if ending.unanswered:
        text = f"slurmctld did not answer srun for {ending.ran_for:.0f} s, which began no task"
        if ending.threadless:
            text = "srun could start no thread (ulimit -u, or memory), and began no task"
        return Cause("program", text, category=Category.TRANSIENT)
    if ending.refused:
        text = f"srun got no step from Slurm: {ending.refused}"
        return Cause("program", text)
    if ending.not_launched:
        why = ", ".join(sorted(set(ending.not_launched.values())))
        text = f"srun could start no task on {fold(sorted(ending.not_launched))}: {why}"
        return Cause("program", text, category=Category.TRANSIENT)
    return None


def _job_over(ending: Ending) -> Cause:
    if ending.timed_out or ending.job_state == "TIMEOUT":
        text = "Slurm ends the job: its time limit is reached"
        return Cause("job_over", text, category=Category.TIME_LIMIT)
    text = "Slurm has ended or requeued the job"
    if ending.job_state:
        text = f"Slurm ends the job: it is {ending.job_state}"
    if ending.job_state == "CANCELLED":
        return Cause("job_over", text, category=Category.USER)
    if ending.faulty:
        return Cause("job_over", f"{text}; {_faults(ending)}", category=Category.HARDWARE)
    return Cause("job_over", text)


def _faults(ending: Ending) -> str:
    return "; ".join(f"{name}: {ending.faulty[name]}" for name in sorted(ending.faulty))


def _program(ending: Ending) -> Cause:
    first = ending.first_failure
    what = describe_end(first) if first else f"it ended with {describe(ending.code)}"
    what += f" after {ending.ran_for:.0f} s"
    category = category_of(first, ending.log)
    if category is not Category.UNKNOWN:
        what += f" ({category}{_named_by_log(first, ending.log)})"
    return Cause("program", what, category=category)


def _named_by_log(first: TaskEnd | None, log: Explanation | None) -> str:
    """Return what the log adds to the end of a task; empty: nothing."""
    if log is None or log.root is None or (first is not None and first.out_of_memory):
        return ""
    rank = "" if log.rank is None else f", rank {log.rank}"
    return f": {log.reason}{rank}"


def category_of(first: TaskEnd | None, log: Explanation | None) -> Category:
    """Return the kind of cause when no node is known to be at fault.

    What slurmstepd counted comes first, then a cause that the log names, then the signal.

    Args:
        first: the end that explains the others; None: it is not known.
        log: what the job's log says; None: it says nothing.
    """
    if first is not None and first.out_of_memory:
        return Category.OUT_OF_MEMORY
    if log is not None and log.root is not None:
        return log.category
    if first is not None and first.by_signal:
        by_signal = _OF_SIGNAL.get(first.code - 128, Category.UNKNOWN)
        if by_signal is not Category.UNKNOWN:
            return by_signal
    if log is not None and any(line.role is Role.CASCADE for line in log.others):
        return log.category
    return Category.UNKNOWN


_OF_SIGNAL: dict[int, Category] = {
    signal.SIGBUS: Category.HARDWARE,
    signal.SIGSEGV: Category.BUG,
    signal.SIGILL: Category.BUG,
    signal.SIGFPE: Category.BUG,
}
"""SIGABRT follows a failure that the log names; SIGKILL and SIGTERM come from outside."""


def killed(code: int) -> bool:
    """Return whether the code stands for a signal. (255 is only a program's ``exit(-1)``.)"""
    return 128 < code <= 128 + signal.SIGRTMAX


def describe_end(end: TaskEnd) -> str:
    """Return the end of a task in words."""
    where = f" on {end.node}" if end.node else ""
    how = "out of memory" if end.out_of_memory else f"with {describe(end.code)}"
    return f"task {end.task}{where} ended {how}"


def describe(code: int) -> str:
    """Return an exit code in words."""
    if killed(code):
        names = {6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
        number = code - 128
        return f"exit code {code} ({names.get(number, f'signal {number}')})"
    return f"exit code {code}"
