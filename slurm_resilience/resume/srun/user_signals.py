"""What a person did: the signals that came, and whether one of them ended the step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

from slurm_resilience.resume.srun import signals
from slurm_resilience.resume.srun.step import SrunStep

PERSON_SECONDS = 60.0
"""A step that ends this soon after a person's signal ended because of it (KillWait is 30 s)."""
TWICE_SECONDS = 2.0
"""srun asks for the second Ctrl-C "within 1 sec" and counts whole seconds of the clock."""


class UserSignals:
    """Hands signals on to the running sruns, and remembers them."""

    def __init__(self, wake: threading.Event, leave: threading.Event) -> None:
        """
        Args:
            wake: set for each signal.
            leave: set when one came that ends things, and no step was there that could be told.
        """
        self._wake = wake
        self.leave = leave
        self.starting = threading.Lock()
        """Held while a step is started."""
        self.steps: list[SrunStep] = []
        """Those that are told."""
        self._signals: list[tuple[float, int]] = []

    def on_signal(self, number: signal.Signals, srun_too: bool) -> None:
        """Called in the thread of `signals.receive`."""
        with self.starting:
            self._signals.append((time.monotonic(), number))
            running = [step for step in self.steps if step.running]
            if not srun_too:
                for step in running:
                    step.send_signal(number)
            if not running and (number in signals.ENDING or number == signal.SIGINT):
                self.leave.set()
        self._wake.set()

    def ending(self) -> int:
        """The first signal that asked for the end."""
        return next(n for _, n in self._signals if n in signals.ENDING or n == signal.SIGINT)

    def interrupted(self, step: SrunStep, stopped: bool, quick: bool) -> str:
        """The signal that ended this step, or that came after it, if there is one.

        One Ctrl-C only asks srun for its state; two within a second end the step.

        Args:
            stopped: the supervisor ended the step.
            quick: this srun ends at the first Ctrl-C.
        """
        recent = [
            (at, number)
            for at, number in self._signals
            if at >= step.started and (step.ended_at or time.monotonic()) - at < PERSON_SECONDS
        ]
        for _, number in recent:
            if number in signals.ENDING:
                return signal.Signals(number).name
        if _twice([at for at, number in recent if number == signal.SIGINT]):
            return "SIGINT twice"
        asked = any(number == signal.SIGINT for _, number in recent)
        # A task that died of SIGINT did so because of a person, who may have sent it with scancel.
        died_of_it = step.code == 128 + signal.SIGINT and not stopped
        if died_of_it or (asked and (self.leave.is_set() or quick)):
            return "SIGINT"
        return "a signal" if step.forced else ""


def _twice(times: Sequence[float]) -> bool:
    return any(second - first < TWICE_SECONDS for first, second in pairwise(times))
