"""Judge by whose fault a block was left, and decide what this process does about it. Pure."""

from __future__ import annotations

import traceback
from typing import Literal, NamedTuple

from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.training.recovery.exceptions import (
    Interrupted,
    PoisonedProcess,
    Unrecoverable,
)
from slurm_resilience.training.state.errors import HealFailed, StateError

OF_COLLECTIVES = ("connection", "gloo", "nccl", "socket", "peer", "store", "timed out", "timeout")
"""Words that one of these is in when a collective fails because a peer is gone."""

OF_FILES = "too many open files"
"""The error of a process that has no file descriptor left."""
OF_LEFT_GROUPS = "is not initialized in the world group map"
"""torch's error where a process group is used that was destroyed."""
OF_THREADS = ("can't start new thread", "Resource temporarily unavailable")
"""The errors where the system has no thread to give: Python's words, and C++'s (gloo's)."""
THREAD_TRIES = 30
"""Faults in one step for want of a thread after which the process is replaced: it may have the last
copy of the state, and others end meanwhile."""
THREAD_PAUSE_SECONDS = 1.0
"""Between two of these."""

_OURS = __file__.rpartition("/")[0].removesuffix("recovery")
"""Frames of files in here say nothing to the author of a block; but those of a recipe do."""


SHOWN = 600
"""Characters of an error that a line shows; its trace is in the log."""


class FaultDecision(NamedTuple):
    """The action of a process after it left a block."""

    then: Literal["again", "give up", "stop", "replace", "end"]
    """again: meet the others, and enter the block; give up: end the training, and tell the others;
    stop: the same, when another has told; replace: ask for a fresh process; end: with the error."""
    reason: str


class Faults:
    """This process's own faults in one step: the same again and again is the program's own."""

    def __init__(self) -> None:
        self._step = -1
        self._count = 0
        self._last = ""

    def add(self, step: int) -> int:
        """Count one; how many there were in this step, this one included."""
        if step != self._step:
            self._count, self._last = 0, ""
        self._count += 1
        self._step = step
        return self._count

    def tell(self, error: BaseException) -> str:
        """Return the fault that was counted last, for the log. What says nothing new is one line:
        our own errors, and the same error again."""
        short, where = said(error), _line(error)
        again, self._last = self._last == short + where, short + where
        at = f"fault {self._count} in {_step(self._step)}: "
        if again:
            return f"{at}{short} (as before)"
        if isinstance(error, SresError) and not isinstance(error, HealFailed):
            return f"{at}{folded(str(error))}{where}"
        trace = error.__traceback__
        while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
        return at + "".join(lines).rstrip()


class Hangs:
    """Worlds that ended because one process stood still, as this one saw them."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None
        self._count = 0

    def add(self, end: GenerationEnd, step: int) -> int:
        """Count how often the same process stood still in the same step; 0: this end is no such.
        Processes that are replaced for it are counted by their launcher.

        Args:
            end: how the world ended.
            step: this process's committed steps.
        """
        if end.kind != "hang" or not end.culprit:
            return 0
        here = (end.culprit, step)
        self._count = self._count + 1 if here == self._last else 1
        self._last = here
        return self._count


def folded(text: str) -> str:
    """In one line, which others can read line by line too."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


def said(error: BaseException) -> str:
    """Kind and words of an error, in one line."""
    if isinstance(error, StopIteration) and not error.args:
        return (
            "StopIteration: next() found no batch left (a loop that counts by itself begins anew "
            "after a fault: take batches by `for batch in s.loader(…)`)"
        )
    if isinstance(error, ValueError) and OF_LEFT_GROUPS in str(error):
        return (
            "ValueError: a process group of a world that has ended is used (it is kept outside of "
            "the function, or in an object?): make it whenever the function is entered, by "
            "s.new_group(…)"
        )
    return folded(f"{type(error).__name__}: {error}")


def may_be_a_peers(error: BaseException) -> bool:
    """Tell whether this looks like what a collective raises when a peer is gone."""
    if isinstance(error, (Interrupted, HealFailed)):
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = str(error).lower()
    return any(word in text for word in OF_COLLECTIVES)


def is_own(error: BaseException, end: GenerationEnd, me: str) -> bool:
    """Tell whether the world ended because of what this process raised.

    Args:
        error: what the block was left by.
        end: how the world ended.
        me: this process's id in the mesh.
    """
    return end.culprit == me and end.kind == "fault" and not isinstance(error, Unrecoverable)


def is_poisoned(error: BaseException) -> bool:
    """Tell whether this process is of no use after an error, while a fresh one would be."""
    if isinstance(error, PoisonedProcess):
        return True
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):  # torch's
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def lacks_threads(error: BaseException) -> bool:
    """Tell whether the system had no thread to give."""
    words = str(error).strip()
    return isinstance(error, RuntimeError) and words in OF_THREADS


def is_exhausted(error: BaseException) -> bool:
    """Tell whether the process has used up what a fresh one may have: a leak of the program's."""
    leaks = isinstance(error, (OSError, RuntimeError)) and OF_FILES in str(error).lower()
    return leaks or lacks_threads(error)


def verdict(
    error: BaseException,
    end: GenerationEnd,
    *,
    seat: int,
    step: int,
    count: int,
    most: int,
    recovers: bool,
    hangs: int = 0,
    before: str = "",
) -> FaultDecision:
    """Decide what follows from the way in which a block was left.

    Args:
        error: what it was left by.
        end: how the world ended.
        seat: this process's seat.
        step: its committed steps.
        count: its own faults in this step; 0: this one is not its own.
        most: own faults in one step after which the training ends.
        recovers: is recovery in the process on?
        hangs: how often the process that ended the world has stood still in this step.
        before: how the world before this one ended, for people; empty: not known.
    """
    if end.kind == "stop":
        return FaultDecision("stop", end.reason)
    if hangs >= max(most, 2):  # once may be a slow disk
        return FaultDecision("give up", f"{end.reason}; {hangs} times in {_step(step)}")
    if isinstance(error, Unrecoverable):
        since = f" (the world before ended: {before})" if before else ""
        return FaultDecision("give up", folded(f"{error}{since}"))
    if count and isinstance(error, (StateError, UsageError)) and not isinstance(error, HealFailed):
        text = f"{folded(str(error))}{_line(error)}"
        return FaultDecision("give up", f"seat {seat} in {_step(step)}: {text}")
    if count >= (max(most, THREAD_TRIES) if lacks_threads(error) else max(most, 1)):
        if is_exhausted(error):
            text = f"{said(error)}, {count} times in {_step(step)}"
            return FaultDecision("replace", f"{text}: this process asks to be replaced")
        text = f"{said(error)}{_line(error)}"
        return FaultDecision(
            "give up", f"seat {seat} failed {count} times in {_step(step)}: {text}"
        )
    if count and is_poisoned(error):
        short = folded(str(error))
        return FaultDecision(
            "replace", f"this process cannot go on ({short}): it asks to be replaced"
        )
    if not recovers and end.kind != "join":
        return FaultDecision("end", f"in-process recovery is off: this process ends ({end.reason})")
    return FaultDecision("again", end.reason)


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_OURS + "recipes/")


def _step(step: int) -> str:
    return f"step {step}" if step >= 0 else "the time before the first step"


def _line(error: BaseException) -> str:
    """Return the block's line that led to it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        if not _is_ours(file) and not file.startswith("<") and "site-packages" not in file:
            return f" ({file}:{frame.lineno})"
    return ""
