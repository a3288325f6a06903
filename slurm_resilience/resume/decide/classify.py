"""Classify why a step ended. Pure.

srun's exit code never decides (137 on Slurm 22.05 and 1 on 26.05 for the same lost node): node
states, sresctld's verdicts and what the user did come first.
"""

from __future__ import annotations

import signal
from typing import Literal

import msgspec


class Ending(msgspec.Struct, frozen=True):
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
    """Slurm said that the step was cancelled, and not by us."""
    stopped_by_us: bool = False
    ended_at: float = 0.0
    """Seconds since the epoch; 0: not known."""
    nodes: tuple[str, ...] = ()
    """The nodes of the step."""
    first_failed: str = ""
    """The only node with tasks that failed by themselves; empty: several, or not known."""


class Cause(msgspec.Struct, frozen=True):
    """The cause of an end, with the reason in words."""

    kind: Literal["done", "user", "job_over", "node", "program"]
    reason: str
    nodes: tuple[str, ...] = ()
    """The nodes to leave, for ``node``."""


def classify(ending: Ending) -> Cause:
    """Return why the step ended."""
    if ending.code == 0 and not ending.stopped_by_us:
        return Cause("done", "the program ended well")
    if ending.job_state not in ("RUNNING", "SUSPENDED"):
        if not ending.job_state:
            return Cause("job_over", "Slurm has ended or requeued the job")
        return Cause("job_over", f"Slurm ends the job: it is {ending.job_state}")
    if ending.interrupted:
        return Cause("user", f"the user sent {ending.interrupted}")
    if ending.cancelled and not ending.stopped_by_us:
        return Cause("user", "the step was cancelled")
    if ending.faulty:
        names = tuple(sorted(ending.faulty))
        reasons = "; ".join(f"{name}: {ending.faulty[name]}" for name in names)
        return Cause("node", reasons, names)
    return Cause("program", f"it ended with {describe(ending.code)} after {ending.ran_for:.0f} s")


def killed(code: int) -> bool:
    """Return whether the code stands for a signal. (255 is only a program's ``exit(-1)``.)"""
    return 128 < code <= 128 + signal.SIGRTMAX


def describe(code: int) -> str:
    """Return an exit code in words."""
    if killed(code):
        names = {6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
        number = code - 128
        return f"exit code {code} ({names.get(number, f'signal {number}')})"
    return f"exit code {code}"
