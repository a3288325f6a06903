"""Run checks: time limits, exceptions and log lines are here, so that they are in no check.

A check that raises, hangs or cannot tell is *unjudged*: it never makes a node sick, and never
vouches for one.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slurm_resilience.clock import Clock
from slurm_resilience.health import check_child
from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.injected_tree import marked
from slurm_resilience.model import CheckResult

log = logging.getLogger("sresd.checks")


class CheckRunner:
    """Runs its checks one after the other, each in a thread of its own, or in a child process.

    A thread that hangs in the kernel (a dead file server under statvfs) cannot be ended; it is left
    behind, and its check is not started again until it has come back: one lost thread a check. A
    child is killed at its time limit; one that not even SIGKILL ends is left behind like a thread.
    """

    def __init__(self, checks: Sequence[Check], context: CheckContext, clock: Clock) -> None:
        self._checks = tuple(checks)
        self._context = context
        self._clock = clock
        self._first: dict[str, Any] = {}
        self._earlier: dict[str, deque[Any]] = {}
        self._hanging: dict[str, tuple[threading.Thread, float]] = {}
        self._children = check_child.ChildProbes()
        self._locks = {check.name: threading.Lock() for check in self._checks}
        """A check runs once at a time: in the loop, or because sresctld asked for it."""

    def add(self, checks: Iterable[Check]) -> None:
        """Take more checks; one of a name that is known takes its place."""
        for check in checks:
            self._locks.setdefault(check.name, threading.Lock())
            self._checks = (*(one for one in self._checks if one.name != check.name), check)

    def run(
        self, done: Callable[[CheckResult], object], context: CheckContext | None = None
    ) -> None:
        """Run every check once, handing each result to ``done`` as it comes.

        Args:
            done: called with each result.
            context: replaces the one given at first, e.g. when Slurm has answered meanwhile.
        """
        self.run_some(self._checks, done, context)

    def run_some(
        self,
        checks: Iterable[Check],
        done: Callable[[CheckResult], object],
        context: CheckContext | None = None,
    ) -> None:
        """Run these checks once, as `run` does all of them."""
        self._context = context or self._context
        for check in checks:
            done(self.run_one(check))

    def run_one(self, check: Check) -> CheckResult:
        """Run one of these checks within its time limit, after a run of it that is under way."""
        with self._locks[check.name]:
            return self._run_alone(check)

    def _run_alone(self, check: Check) -> CheckResult:
        began = self._clock.monotonic()
        try:
            judgement = marked(check.name, self._within_limit(check), self._context)
        except Unjudged as reason:
            return CheckResult(check.name, "unjudged", str(reason), (), self._since(began))
        except Exception as error:
            log.warning("%s raised %s: %s", check.name, type(error).__name__, error)
            text = f"{type(error).__name__}: {error}"
            return CheckResult(check.name, "unjudged", text, (), self._since(began))
        text, findings = judgement
        seconds = self._since(began)
        return CheckResult(check.name, "fail" if findings else "pass", text, findings, seconds)

    def _since(self, began: float) -> float:
        return round(self._clock.monotonic() - began, 6)

    def _within_limit(self, check: Check) -> Judgement:
        if check.name in self._hanging:
            thread, began = self._hanging[check.name]
            if thread.is_alive():
                since = self._clock.monotonic() - began
                raise Unjudged(f"a run that began {since:.0f} s ago still hangs")
            del self._hanging[check.name]
        seen: list[Any] = []
        raised: list[BaseException] = []
        earlier = self._earlier.setdefault(check.name, deque(maxlen=check.remembers))
        context = dataclasses.replace(
            self._context,
            now=self._clock.now(),
            first=self._first.get(check.name),
            earlier=tuple(earlier),
        )
        if check.absent is not None and (why := check.absent(context)):
            return Judgement(why)
        if check.in_child:
            reading = self._children.probe(check, context)
            return self._judge(check, reading, context)

        def body() -> None:
            try:
                seen.append(check.probe(context))
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=body, name=f"check {check.name}", daemon=True)
        began = self._clock.monotonic()
        thread.start()
        thread.join(check.timeout)
        if raised:
            raise raised[0]
        if not seen:
            self._hanging[check.name] = (thread, began)
            raise Unjudged(f"no answer within {check.timeout:g} s")
        return self._judge(check, seen[0], context)

    def _judge(self, check: Check, reading: Any, context: CheckContext) -> Judgement:
        self._first.setdefault(check.name, reading)
        self._earlier[check.name].append(reading)
        return check.judge(reading, context)
