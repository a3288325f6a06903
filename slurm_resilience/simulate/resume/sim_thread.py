"""A thread of the supervisor that runs in simulated time, in turns with all else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_resilience.simulate.schedule import Schedule

LOOK_SECONDS = 0.2
"""Between two looks whether something that is waited for has happened."""


class ThreadGone(BaseException):
    """The supervisor is gone, and all of its threads with it."""


class SimThread:
    """It runs while the schedule waits for it, and the schedule goes on while it waits."""

    def __init__(
        self,
        schedule: Schedule,
        run: Callable[[], None],
        set_running: Callable[[object], None],
        stopped_until: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            schedule: of the simulation.
            run: what the thread does.
            set_running: is told which thread runs; None: the supervisor's own.
            stopped_until: returns when the supervisor's process goes on, which is stopped.
        """
        self._schedule = schedule
        self._stopped_until = stopped_until
        self._run_it = run
        self._set_running = set_running
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.over = self._gone = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        schedule.after(0.0, self._go)

    def _main(self) -> None:
        self._turn.acquire()
        try:
            if not self._gone:
                self._run_it()
        except ThreadGone:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.over = True
            self._back.release()

    def _go(self) -> None:
        """Let it run until it waits for something, or ends."""
        if self.over:
            return
        self._set_running(self)
        self._turn.release()
        self._back.acquire()
        self._set_running(None)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pass_time(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Wait, in the thread itself.

        Raises:
            ThreadGone: the supervisor is gone.
        """
        if self._gone:
            raise ThreadGone  # what a thread does at its end is not done either
        until = self._schedule.now + seconds
        if not enough():
            self._look_later(until, enough)
            self._back.release()
            self._turn.acquire()
        if self._gone:
            raise ThreadGone

    def _look_later(self, until: float, enough: Callable[[], bool]) -> None:
        now = self._schedule.now
        self._schedule.at(min(until, now + LOOK_SECONDS), self._look, until, enough)

    def _look(self, until: float, enough: Callable[[], bool]) -> None:
        stopped_until = self._stopped_until()
        if self._schedule.now < stopped_until and not self._gone:
            self._schedule.at(stopped_until, self._look, until, enough)
        elif self._schedule.now >= until or enough() or self._gone:
            self._go()
        else:
            self._look_later(until, enough)

    def end(self) -> None:
        """End it: its supervisor is gone."""
        if not self.over:
            self._gone = True
            self._go()
        self._thread.join()
