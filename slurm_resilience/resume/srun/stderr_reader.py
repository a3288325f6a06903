"""Read srun's standard error for what it tells of its step, its nodes and its tasks. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from enum import Flag, auto
from typing import NamedTuple

from slurm_resilience.errors import SresError
from slurm_resilience.slurm.hostlists import expand

# Patterns are compiled when srun prints something that they are for: no step waits for it.
# What Slurm prints when the user cancels a step; a node failure is named.
_STEP_ENDS = (
    rb"(?m)^[^\n]{0,9}(?:slurmstepd[^ ]*:|\[[0-9T:.-]+\]) error: \*\*\* STEP (?P<step>\S+) ON \S+ "
    rb"CANCELLED AT [0-9T:.-]+ "
)
_CANCELLED = _STEP_ENDS + rb"(?P<why>\*\*\*|DUE to SIGNAL \w+|DUE TO TIME LIMIT)"
# The same where it preempts the job without a GraceTime, or requeues it.
_PREEMPTED = _STEP_ENDS + rb"DUE TO (?:PREEMPTION|JOB REQUEUE) "
# The same for any cause, such as the end of the job.
_ENDED_BY_SLURM = rb"\*\*\* STEP (\S+) ON \S+ CANCELLED AT "
# What srun prints when a signal made it end its step.
_FORCED = b"srun: forcing job termination"
# What srun prints when it is told that its step is over, and an error of its own that would be the
# cause: anything that is not about how a task ended. It prints the cause first: where it loses a
# node after the step was cancelled, the line about the node comes later.
_ABORTED = b"srun: Job step aborted"
_WAITS_UP_TO = rb"srun: Job step aborted: Waiting up to (\d{1,6}) seconds"
# Nor is what strangers send to srun's ports (a scanner, another user).
_CAUSE = (
    rb"(?m)^srun: error: (?!\S+: tasks? [\d,-]+: |eio_message_socket_accept: |unpack"
    rb"|destroy_forward: |slurm_(?:unpack_received|receive)_msg|io_init_msg_"
    rb"|failed reading io init message)"
)
# A node that Slurm gave up under a step that lives on, and tasks that ended badly.
_NODE_FAILURE = rb"(?m)^srun: error: Node failure on (\S+)$"
_TASK_ENDED = rb"(?m)^srun: error: (\S+): tasks? ([\d,-]+): ([^\n]*)$"
# A task that never began. srun exits with 0 for it: it has no exit code.
_NOT_LAUNCHED = rb"(?m)^srun: error: task \d+ launch failed: "
# A node on which no task of a step could be started: srun ends the step for it, and slurmstepd
# words that as it does a person's cancel.
_LAUNCH_FAILED = (
    rb"(?m)^srun: error: Task launch for StepId=(?P<step>\S+) failed on node (?P<node>\S+): "
    rb"(?P<why>[^\n]*)$"
)
# slurmctld is away, or has too much to do: srun has no step then, and no task has begun.
_UNANSWERED = (
    rb"(?m)^srun: error: Unable to (?:confirm allocation|create step) for job \d+: "
    rb"(?:Unable to contact slurm controller|Socket timed out on send/recv operation"
    rb"|Zero Bytes were transmitted or received|Slurm backup controller in standby mode"
    rb"|Unexpected missing socket error|Connection reset by peer)"
)
# slurmctld's answer where it makes no step, and srun does not wait for one.
_REFUSED = rb"(?m)^srun: error: Unable to create step for job \d+: ([^\n]*)$"
# The user's processes are used up (ulimit -u), or this machine's memory: srun gives up then.
_NO_THREAD = rb"(?m)^srun: fatal: \w+: pthread_create error "
# srun itself ends a step whose task failed (--kill-on-bad-exit), or whose node it has lost touch
# with, and Slurm words that the same.
_SRUN_ENDS = (
    rb"srun: (?:[^\n]*Terminating StepId=|error: Aborting, |error: \w+: aborting, io error "
    rb"|error: Cannot communicate with node \d+\.  Aborting job)"
)
# What srun prints when it has waited long enough for a node of such a step.
_TIMED_OUT = b"srun: error: Timed out waiting for job step to complete"
_LAUNCH_WORDS = (b"srun: error: Task launch for ", b"srun: error: Application launch failed")
_ENDS = (b"CANCELLED AT", _ABORTED, _FORCED, *_LAUNCH_WORDS)
"""Words on the end of a step, whatever its cause."""
_BY_SLURM = (b"srun: ", b"CANCELLED AT")
"""One of these is in everything that is looked for."""
_KILLED_CODES = frozenset(
    128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
)
"""Exit codes of tasks that a person, Slurm or srun ended."""
KILL_WAIT_SECONDS = 32.0
"""For so long srun waits for an aborted step by default: KillWait, and 2 s."""
SLACK_SECONDS = 8.0
"""To that, on a busy machine."""
_LINE_LIMIT_BYTES = 65536
_MOST_STEPS = 1000


class EndedTasks(NamedTuple):
    """Tasks of which srun reported that they ended badly."""

    nodes: tuple[str, ...]
    tasks: tuple[int, ...]
    how: str


PROLOG_FAILED = "Job prolog failed"
"""srun's reason where the job's prolog failed on a node."""


class FailedLaunch(NamedTuple):
    """A node on which srun could start no task of a step."""

    step: str
    node: str
    why: str


class SrunReport(Flag):
    """All that srun or Slurm may report of the step."""

    NOTHING = 0
    FORCED = auto()
    """srun: a signal made it end the step."""
    ABORTED = auto()
    """srun: Slurm ended the step, and srun has given no cause before."""
    NOT_LAUNCHED = auto()
    """srun: a task could not be started, of this step or of one that a task of it ran."""
    UNANSWERED = auto()
    """srun: slurmctld did not answer it, so that it has no step, or a task's own srun has none."""
    NO_THREAD = auto()
    """srun, or a task's own one: it could start no thread, and has given up."""
    CAUSE = auto()
    """srun: an error of its own, which explains the end."""
    ENDED_BY_SRUN = auto()
    """srun: it ends the step itself."""
    TIMED_OUT = auto()
    """srun: a node of a step that ended has not told of its tasks, and is waited for no longer."""
    ENDED_FROM_OUTSIDE = auto()
    """The step did not end by its tasks' own ends alone: Slurm, srun or a signal ended it."""


class StderrReader:
    """All that the standard error of one srun has told so far.

    One thread reads; others look at what it found, also while they go through a set of it: each of
    these is exchanged, never changed.
    """

    def __init__(self) -> None:
        self.report = SrunReport.NOTHING
        self.cancelled_steps: frozenset[str] = frozenset()
        """Slurm ended these steps for a person, or at their time limit: ours, and any that a task
        prints of."""
        self.ended_steps: frozenset[str] = frozenset()
        """slurmstepd told that it ends these, for whatever cause."""
        self.timed_out_steps: frozenset[str] = frozenset()
        self.preempted_steps: frozenset[str] = frozenset()
        """Slurm ended these as it preempted their job at once, or requeued it."""
        self.failed_nodes: frozenset[str] = frozenset()
        """Slurm gave these nodes up while the step ran."""
        self.failed_launches: frozenset[FailedLaunch] = frozenset()
        """Those of our step, and of any that a task prints of."""
        self.ended_tasks: list[EndedTasks] = []
        self.ended_before_abort: int | None = None
        """So many of them came before srun told that its step was aborted; None: it did not."""
        self.aborted_at = self.cancelled_at = float("-inf")
        """When srun, or slurmstepd, last told of a step's end."""
        self.refused = ""
        """srun's words for the reason for which it got no step, or a task's own srun got none."""
        self.wait_seconds = KILL_WAIT_SECONDS
        """srun goes on for no longer after it has told that its step was aborted."""
        self._rest = b""

    @property
    def was_aborted(self) -> bool:
        """Return whether srun has ever told that its step was aborted, whatever the cause."""
        return self.aborted_at > float("-inf")

    def is_recent(self, at: float, now: float) -> bool:
        """Return whether words on a step's end are so new that srun may still wait for that end.

        They may be of another step: a task may run an srun of its own, and print what that says.

        Args:
            at: when they were told.
            now: monotonic seconds.
        """
        return now - at <= self.wait_seconds + SLACK_SECONDS

    def read(self, data: bytes, now: float = 0.0) -> bool:
        """Take more of the text in; True: it told of a node, a task or the step's end by Slurm.

        Args:
            data: the next part of the text.
            now: monotonic seconds.
        """
        text = (self._rest + data)[-_LINE_LIMIT_BYTES:]
        self._rest = text[text.rfind(b"\n") + 1 :]
        if not any(word in text for word in _BY_SLURM):
            return False  # a program's output, of which there may be much
        if re.search(_SRUN_ENDS, text):
            self.report |= SrunReport.ENDED_BY_SRUN
        by_srun = SrunReport.ENDED_BY_SRUN in self.report
        if b"CANCELLED AT" in text:
            names = re.findall(_ENDED_BY_SLURM, text)[:_MOST_STEPS]
            self.ended_steps |= {name.decode("utf-8", "replace") for name in names}
            names = re.findall(_PREEMPTED, text)[:_MOST_STEPS]
            self.preempted_steps |= {name.decode("utf-8", "replace") for name in names}
        if b"CANCELLED AT" in text and not by_srun:
            self._read_cancelled(text)
        if _FORCED in text:
            self.report |= SrunReport.FORCED
        if _TIMED_OUT in text:
            self.report |= SrunReport.TIMED_OUT
        if by_srun or any(word in text for word in _ENDS):
            self.report |= SrunReport.ENDED_FROM_OUTSIDE
        if _ABORTED in text:
            self._read_aborted(text, now)
        told_end = _ABORTED in text or b"CANCELLED AT" in text
        if b"CANCELLED AT" in text:
            self.cancelled_at = now
        return self._read_lines(text[: text.rfind(b"\n") + 1]) or told_end

    def _read_aborted(self, text: bytes, now: float) -> None:
        before = text[: text.index(_ABORTED)]
        waits = re.search(_WAITS_UP_TO, text)
        if waits:
            self.wait_seconds = float(waits[1])
        if self.ended_before_abort is None or not self.is_recent(self.aborted_at, now):
            self.ended_before_abort = len(self.ended_tasks) + len(re.findall(_TASK_ENDED, before))
        self.aborted_at = now
        if not self._explains(before):
            self.report |= SrunReport.ABORTED

    def _explains(self, before: bytes) -> bool:
        """Return whether srun has given a cause, up to this text."""
        told = self.report & (SrunReport.CAUSE | SrunReport.ENDED_BY_SRUN)
        return bool(told or re.search(_CAUSE, before) or re.search(_SRUN_ENDS, before))

    def _read_cancelled(self, text: bytes) -> None:
        for line in re.finditer(_CANCELLED, text):
            if len(self.cancelled_steps) < _MOST_STEPS:
                name = line["step"].decode("utf-8", "replace")
                before = self.failed_launches | _launches(text[: line.start()])
                if name in {failed.step for failed in before}:
                    continue  # srun's own order
                self.cancelled_steps |= {name}
                if line["why"] == b"DUE TO TIME LIMIT":
                    self.timed_out_steps |= {name}

    def _read_lines(self, lines: bytes) -> bool:
        if re.search(_CAUSE, lines):
            self.report |= SrunReport.CAUSE
        if re.search(_NOT_LAUNCHED, lines):
            self.report |= SrunReport.NOT_LAUNCHED
        if re.search(_UNANSWERED, lines):
            self.report |= SrunReport.UNANSWERED
        for why in re.findall(_REFUSED, lines):
            self.refused = why.decode("utf-8", "replace")
        launches = _launches(lines)
        self.failed_launches |= launches
        if re.search(_NO_THREAD, lines):
            self.report |= SrunReport.NO_THREAD
        failures, ended = re.findall(_NODE_FAILURE, lines), re.findall(_TASK_ENDED, lines)
        for nodes in failures:
            self.failed_nodes |= frozenset(_expanded(nodes))
        for nodes, tasks, how in ended:
            numbers = tuple(int(name[1:]) for name in _expanded(b"t[" + tasks + b"]"))
            self.ended_tasks.append(
                EndedTasks(_expanded(nodes), numbers, how.decode("utf-8", "replace"))
            )
        return bool(failures or launches or ended)


def _launches(text: bytes) -> frozenset[FailedLaunch]:
    return frozenset(
        FailedLaunch(
            *(part.decode("utf-8", "replace") for part in found.group("step", "node", "why"))
        )
        for found in re.finditer(_LAUNCH_FAILED, text)
    )


def code_of(how: str) -> int:
    """Return a task's exit code as a shell shows it, from srun's words; 1: it cannot be read."""
    match = re.search(r"exit code (\d+)", how)
    if match:
        return int(match[1])
    words = how.partition(" (")[0].strip()  # "Aborted (core dumped)"
    names = {signal.strsignal(number): 128 + number for number in signal.Signals}
    return names.get(words, 1)


def killed_from_outside(ends: Iterable[EndedTasks]) -> bool:
    """Return whether tasks ended as they do when a person, Slurm or srun ends them."""
    return any(code_of(ended.how) in _KILLED_CODES for ended in ends)


def _expanded(hostlist: bytes) -> tuple[str, ...]:
    """Return the names of a hostlist; none where the line is a program's and not srun's."""
    try:
        return expand(hostlist.decode())
    except (SresError, UnicodeDecodeError):
        return ()
