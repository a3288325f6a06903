"""Ask Slurm while slurmctld may be away for a while, e.g. to be updated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from slurm_resilience.clock import Clock
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.resume import report

ASK_AGAIN_SECONDS = 1.0
"""Until slurmctld is asked again when it does not answer."""
SAY_SECONDS = 60.0
"""Between two lines that slurmctld is still waited for."""
_T = TypeVar("_T")


def ask_patiently(
    ask: Callable[[], _T],
    patience: float,
    clock: Clock,
    stop: threading.Event,
    waits: str = "waiting for slurmctld",
) -> _T:
    """Return Slurm's answer; while slurmctld is away, wait for it: then the log tells so.

    Args:
        ask: a question, or an order that may be given again.
        patience: seconds for which slurmctld may be away.
        clock: the time.
        stop: set when the user ends this; nothing is waited for any more.
        waits: what is done meanwhile, in words.

    Raises:
        SlurmUnreachable: it was away for longer, or the user ended this.
        SresError: any other answer, at once.
    """
    began = clock.monotonic()
    told = float("-inf")
    while True:
        try:
            return ask()
        except SlurmUnreachable as error:
            stopped = clock.wait(stop, ASK_AGAIN_SECONDS)
            if stopped or clock.monotonic() - began > patience:
                raise
            now = clock.monotonic()
            if now - told > SAY_SECONDS:
                told = now
                waited = f"since {now - began:.0f} s, {patience:.0f} s at most"
                report.say(f"{waits}: {error} ({waited})")
