"""The user's signals: hand them on to srun, and tell whether one of them ended a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from itertools import pairwise

from slurm_resilience.clock import Clock
from slurm_resilience.resume.srun import signals
from slurm_resilience.resume.srun.step import SrunStep

SIGNAL_SECONDS = 60.0
"""A step that ends this soon after a signal ended because of it (KillWait is 30 s)."""
TWICE_SECONDS = 2.0
"""srun asks for the second Ctrl-C "within 1 sec" and counts whole seconds of the clock."""


class UserSignals:
    """Hand signals on to the running sruns, and remember them."""

    def __init__(self, wake: threading.Event, user_stop: threading.Event, clock: Clock) -> None:
        """
        Args:
            wake: set for each signal.
            user_stop: set when a signal asks for the end, and no step runs that could be told.
            clock: the time.
        """
        self._clock = clock
        self._wake = wake
        self._user_stop = user_stop
        self.starting = threading.Lock()
        """Held while a step is started."""
        self.steps: list[SrunStep] = []
        """The sruns that get the signals."""
        self._signals: list[tuple[float, int]] = []

    def add(self, step: SrunStep) -> None:
        """Pass the signals on to one more srun, and forget those that are over: a step that grows
        and shrinks has a new one each time, for months. `starting` is held.

        Args:
            step: it was just started.
        """
        self.steps = [each for each in self.steps if each.running or each.may_leave_tasks]
        self.steps.append(step)

    def on_signal(self, number: signal.Signals, srun_too: bool) -> None:
        """Take a signal in; called in the thread of `signals.receive`.

        Args:
            number: the signal.
            srun_too: srun got it as well, from the same sender.
        """
        with self.starting:
            self._signals.append((self._clock.monotonic(), number))
            running = [step for step in self.steps if step.running]
            if not srun_too:
                for step in running:
                    step.send_signal(number)
            if not running and (number in signals.ENDING or number == signal.SIGINT):
                self._user_stop.set()
        self._wake.set()

    def ending(self) -> int:
        """Return the first signal that asked for the end."""
        return next(n for _, n in self._signals if n in signals.ENDING or n == signal.SIGINT)

    def ended(self, step: SrunStep, stopped_by_us: bool, quick: bool) -> str:
        """Return the signal that ended this step, or that came after it; empty: there is none.

        One Ctrl-C only asks srun for its state; two within a second end the step.

        Args:
            step: one srun.
            stopped_by_us: the supervisor ended the step.
            quick: this srun ends at the first Ctrl-C.
        """
        recent = [
            (at, number)
            for at, number in self._signals
            if at >= step.started
            and (step.ended_at or self._clock.monotonic()) - at < SIGNAL_SECONDS
        ]
        for _, number in recent:
            if number in signals.ENDING:
                return signal.Signals(number).name
        if _twice([at for at, number in recent if number == signal.SIGINT]):
            return "SIGINT twice"
        asked = any(number == signal.SIGINT for _, number in recent)
        # A task that died of SIGINT did so by the user's will, who may have sent it with scancel.
        died_of_it = step.code == 128 + signal.SIGINT and not stopped_by_us
        if died_of_it or (asked and (self._user_stop.is_set() or quick)):
            return "SIGINT"
        return "a signal" if step.forced else ""


def _twice(times: Sequence[float]) -> bool:
    return any(second - first < TWICE_SECONDS for first, second in pairwise(times))
