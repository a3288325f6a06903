"""Follow steps: start them, hand their messages on as they come, and end them with their jobs."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from slurm_resilience.clock import Clock
from slurm_resilience.deepcheck.step_lines import LineAssembler, StepMessage
from slurm_resilience.deepcheck.tool_call import END_SIGNAL
from slurm_resilience.slurm.maintenance import StepOrder

TASKS_GRACE_SECONDS = 5.0
"""Seconds that the tasks of a step have to kill their tools and to remove their files."""
STOP_GRACE_SECONDS = 10.0
"""Seconds that srun has to end its job."""
MAX_KEPT_LINES = 50
_NO_NEWS = ("@sres ", "srun: cluster configuration lacks support for cpu binding")
"""The second is srun's word on --cpu-bind=none where no task plugin binds."""


class StepStarter(Protocol):
    """Starts a job of one step."""

    def start_step(self, order: StepOrder) -> subprocess.Popen[str]: ...


class DeepStepEnd(NamedTuple):
    """A step that has ended."""

    code: int
    said: str
    """The last lines of what was no message: srun's complaints, a library's warnings."""


class StepFollower:
    """The steps that are under way; a context manager that leaves none behind."""

    def __init__(self, starter: StepStarter, clock: Clock) -> None:
        self._starter = starter
        self._clock = clock
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> StepFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(
        self,
        orders: list[StepOrder],
        limit_seconds: float,
        heard: Callable[[StepMessage], None],
    ) -> list[DeepStepEnd]:
        """Run steps side by side to their ends.

        Args:
            orders: the steps.
            limit_seconds: those that run longer are stopped.
            heard: called with each message, in the caller's thread.
        """
        lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        steps: list[subprocess.Popen[str]] = []
        for order in orders:
            steps.append(self._starter.start_step(order))
            # At once: where the next one cannot be started, this one is ended.
            self._running.append(steps[-1])
        for number, step in enumerate(steps):
            threading.Thread(target=_read, args=(number, step, lines), daemon=True).start()
        deadline = self._clock.monotonic() + limit_seconds
        assemblers = [LineAssembler() for _ in steps]
        said: list[list[str]] = [[] for _ in steps]
        for number, line in self._lines(lines, len(steps), deadline):
            message = assemblers[number].feed(line)
            if message is not None:
                heard(message)
            elif not line.startswith(_NO_NEWS):
                said[number] = [*said[number], line.rstrip()][-MAX_KEPT_LINES:]
        return [
            DeepStepEnd(step.wait(), "\n".join(said[number])) for number, step in enumerate(steps)
        ]

    def _lines(
        self, lines: queue.SimpleQueue[tuple[int, str | None]], readers: int, deadline: float
    ) -> Iterator[tuple[int, str]]:
        is_stopped = False
        while readers:
            left = deadline - self._clock.monotonic()
            try:
                number, line = lines.get(timeout=max(0.0, left) if not is_stopped else None)
            except queue.Empty:
                self.stop()
                is_stopped = True
                continue
            if line is None:
                readers -= 1
            else:
                yield number, line

    def stop(self) -> None:
        """End every srun, and its job with it. On TERM srun cancels the job, whose tasks Slurm
        kills outright: so they are first asked to end by themselves, by a signal that srun hands
        on."""
        running = self._running
        for number, seconds in (
            (END_SIGNAL, TASKS_GRACE_SECONDS),
            (signal.SIGTERM, STOP_GRACE_SECONDS),
            (signal.SIGKILL, None),
        ):
            running = [step for step in running if step.poll() is None]
            for step in running:
                step.send_signal(number)
            deadline = self._clock.monotonic() + (seconds or 0.0)
            for step in running:
                left = None if seconds is None else max(0.0, deadline - self._clock.monotonic())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(left)
        self._running.clear()


def _read(
    number: int,
    step: subprocess.Popen[str],
    lines: queue.SimpleQueue[tuple[int, str | None]],
) -> None:
    assert step.stdout is not None
    with step.stdout:
        for line in step.stdout:
            lines.put((number, line))
    lines.put((number, None))
