"""Whose fault it is that a block was left, and what this process does about it. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from slurm_resilience.mesh.model import Break
from slurm_resilience.training.signals import Interrupted, PoisonedProcess, Unrecoverable

OF_COLLECTIVES = ("connection", "gloo", "nccl", "socket", "peer", "store", "timed out", "timeout")
"""Words that one of these is in when a collective fails because a peer is gone."""


class Verdict(NamedTuple):
    """What a process does after it left a block."""

    then: Literal["again", "give up", "stop", "replace", "end"]
    """again: meet the others, and enter the block; give up: end the training, and tell the others;
    stop: the same, when another has told; replace: ask for a fresh process; end: with the error."""
    reason: str


class Faults:
    """This process's own faults in one step: the same again and again is the program's own."""

    def __init__(self) -> None:
        self._step = -1
        self._count = 0

    def add(self, step: int) -> int:
        """Count one; how many there were in this step, this one included."""
        self._count = self._count + 1 if step == self._step else 1
        self._step = step
        return self._count


def may_be_a_peers(error: BaseException) -> bool:
    """Does this look like what a collective raises when a peer is gone?"""
    if isinstance(error, Interrupted):
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = str(error).lower()
    return any(word in text for word in OF_COLLECTIVES)


def is_own(error: BaseException, end: Break, me: str) -> bool:
    """Did the world end because of what this process raised?

    Args:
        error: what the block was left by.
        end: how the world ended.
        me: this process's id in the mesh.
    """
    return end.culprit == me and end.kind == "fault" and not isinstance(error, Unrecoverable)


def is_poisoned(error: BaseException) -> bool:
    """Is this process of no use after it, while a fresh one would be?"""
    if isinstance(error, PoisonedProcess):
        return True
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):  # torch's
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def verdict(
    error: BaseException, end: Break, *, seat: int, step: int, count: int, most: int, recovers: bool
) -> Verdict:
    """What follows from the way in which a block was left.

    Args:
        error: what it was left by.
        end: how the world ended.
        seat: this process's seat.
        step: its committed steps.
        count: its own faults in this step; 0: this one is not its own.
        most: own faults in one step after which the training ends.
        recovers: is recovery in the process on?
    """
    if end.kind == "stop":
        return Verdict("stop", end.reason)
    if isinstance(error, Unrecoverable):
        return Verdict("give up", str(error))
    if count >= max(most, 1):
        return Verdict("give up", f"seat {seat} failed {count} times in step {step}: {error!r}")
    if count and is_poisoned(error):
        return Verdict("replace", f"this process cannot go on ({error}): it asks to be replaced")
    if not recovers and end.kind != "join":
        return Verdict("end", f"in-process recovery is off: this process ends ({end.reason})")
    return Verdict("again", end.reason)
