"""The checks, round after round, in a thread of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import queue
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_resilience.agent import kernel_log_reader
from slurm_resilience.agent.evidence.machine_tools import run_tool
from slurm_resilience.agent.facts import SlurmFacts, gpus
from slurm_resilience.agent.health_log import log_path
from slurm_resilience.agent.joining import lifecycle_check
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.errors import NotFound
from slurm_resilience.health import check_registry, profile_files
from slurm_resilience.health.check import Check, CheckContext, Expected, Judgement
from slurm_resilience.health.check_registry import refuse_unknown_names
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.host import planned_loss
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.profile_files import ProfileAnswer, load_profile, shipped_profiles
from slurm_resilience.health.programs.program_checks import (
    DIRECTORY,
    checks_named,
    directory_check,
    program_checks,
    with_programs,
)
from slurm_resilience.model import FAULTY, CheckResult, Finding, Severity
from slurm_resilience.wire.messages import StepChecksRun

log = logging.getLogger("sresd.checks")

ROUND_SECONDS = 1.0
"""Shortest time between two rounds."""
PROFILE = "profile"
"""The check of checks.profile itself."""
PROFILE_SECONDS = 10.0
"""Until a profile that is not read counts as none."""
PATIENCE_SECONDS = 2.0
"""A round waits for so long for one check."""


class CheckLoop:
    """Runs each check at its pace; the outbox takes the results.

    Checks whose time comes within a second of each other run in one round. Each period varies by
    a tenth, so that the nodes of a cluster do not ask a file server in step.
    """

    def __init__(
        self,
        settings: Config,
        facts: SlurmFacts,
        outbox: Outbox,
        clock: Clock,
        stop: threading.Event,
        is_drill: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._is_drill = is_drill
        self._facts = facts
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._failing: set[str] = set()
        self._running: dict[str, threading.Thread] = {}
        """The last run of each check, in a round."""
        self._broken: list[Exception] = []
        """Errors of our own in such a run; those of a check make it unjudged."""
        self._listed: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        """The names in checks.directory, whenever it could be read."""
        self._has_programs = False
        self._checks = checks_of(settings, ())
        if settings.checks.directory:
            check = directory_check(settings.checks.directory, self._note_programs)
            self._checks = (check, *self._checks)
        self._runner = self._new_runner()

    def add(self, check: Check) -> None:
        """Add a check, before the thread is started. It is run before the others: its first verdict
        shows that there is such a check."""
        self._checks = (check, *self._checks)
        self._runner = self._new_runner()

    def _new_runner(self) -> CheckRunner:
        # What Slurm expects is asked for in the first round.
        first = CheckContext(Path(self._settings.agent.sysroot), self._settings.checks)
        return CheckRunner(self._checks, first, self._clock)

    def run(self) -> None:
        """Run the thread."""
        if self._settings.checks.directory:
            # First: this node is sound when all its checks have looked.
            asked = CheckContext(Path(self._settings.agent.sysroot), self._settings.checks)
            self._run_beside(self._named(DIRECTORY), asked)
        due: dict[str, float] = {}
        while not self._stop.is_set():
            now = self._clock.monotonic()
            if self._take_programs() or not due:
                names = [check.name for check in self._checks]
                self._outbox.expect((kernel_log_reader.NAME, *names))
                due = {name: due.get(name, now) for name in names}
            checks = [check for check in self._checks if due[check.name] <= now]
            # What Slurm expects is read again while something fails: an administrator may have
            # taken the missing GPU out of slurm.conf, so that the node can go on without it.
            known = context(self._settings, self._facts, again=bool(self._failing))
            check_context = dataclasses.replace(known, is_drill=self._is_drill())
            for check in checks:
                self._run_beside(check, check_context)
            now = self._clock.monotonic()
            for check in checks:
                due[check.name] = now + self.period(check) * random.uniform(0.9, 1.1)
            next_due = min(due.values(), default=now + self._settings.agent.check_interval)
            shortest = min(ROUND_SECONDS, self._settings.agent.check_interval)
            self._clock.wait(self._stop, max(next_due - now, shortest))

    def _note_programs(self, names: tuple[str, ...]) -> None:
        self._listed.put(names)

    def _take_programs(self) -> bool:
        """Add the checks of the site's programs, once their directory could be read."""
        try:
            names = self._listed.get_nowait()
        except queue.Empty:
            return False
        if self._has_programs:
            return False
        self._has_programs = True
        settings = self._settings.checks
        own = checks_named(settings.directory, names, settings.disabled, _logs(self._settings))
        self._checks = with_programs(self._checks, own)
        self._runner.add(own)
        refuse_unknown_names(settings, names)
        return True

    def _run_beside(self, check: Check, check_context: CheckContext) -> None:
        """Run a check, and go on without it when it takes long: it must hold up no other one."""
        before = self._running.get(check.name)
        if before is not None and before.is_alive():
            return

        def body() -> None:
            try:
                self._runner.run_some([check], self._put_up, check_context)
            except Exception as error:
                self._broken.append(error)

        name = f"round {check.name}"
        thread = threading.Thread(target=body, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # A job may have taken all process numbers: the next round tries again.
            log.warning("%s cannot be run: %s", check.name, error)
            return
        self._running[check.name] = thread
        # One after the other as a rule: jobs shall not notice a round.
        thread.join(PATIENCE_SECONDS)
        if self._broken:
            raise self._broken[0]  # half an agent is none: sresd ends, and is started anew

    def period(self, check: Check) -> float:
        """Return the seconds between two runs of a check."""
        own = check.period if check.period is not None else self._settings.agent.check_interval
        return self._settings.checks.periods.get(check.name, own)

    def run_now(self, name: str) -> CheckResult:
        """Run one check at once, beside the loop or between two of its checks.

        Raises:
            NotFound: this sresd has no such check.
        """
        result = self._runner.run_one(self._named(name))
        self._put_up(result)
        return result

    def _named(self, name: str) -> Check:
        for check in self._checks:
            if check.name == name:
                return check
        known = ", ".join(check.name for check in self._checks)
        raise NotFound(f"this node has no check '{name[:50]}'; it has {known}")

    def run_chosen(self, only: Sequence[str], seconds: float) -> tuple[CheckResult, ...]:
        """Run checks beside each other and the loop, and return their results.

        Args:
            only: their names; none: all but those that take long.
            seconds: limit for all of them together; what comes later is put up when it comes.

        Raises:
            NotFound: this sresd has no such check.
        """
        checks = [self._named(name) for name in dict.fromkeys(only)]
        checks = checks or [check for check in self._checks if not check.is_slow]
        results = self._run_together(checks, seconds)
        late = f"no result within {seconds:g} s"
        return tuple(
            results.get(check.name, CheckResult(check.name, "unjudged", late)) for check in checks
        )

    def run_after_step(self, seconds: float) -> StepChecksRun:
        """Run all quick checks that may take this node out of service, beside each other and the
        loop: a step has failed here. Results that come too late are put up when they come.

        Args:
            seconds: limit for all of them together.
        """
        checks = [
            check
            for check in self._checks
            if not FAULTY.isdisjoint(check.asks_for) and not check.is_slow
        ]
        results = self._run_together(checks, seconds)
        judged = {one.check for one in results.values() if one.verdict != "unjudged"}
        unjudged = tuple(check.name for check in checks if check.name not in judged)
        return StepChecksRun(len(checks), unjudged)

    def _run_together(self, checks: Sequence[Check], seconds: float) -> dict[str, CheckResult]:
        """Return the results that are there in time, by the names of the checks."""
        results: queue.SimpleQueue[CheckResult] = queue.SimpleQueue()

        def body(check: Check) -> None:
            result = self._runner.run_one(check)
            self._put_up(result)
            results.put(result)

        for check in checks:
            # Daemon threads: a check that hangs in the kernel must not keep sresd from ending.
            name = f"asked {check.name}"
            threading.Thread(target=body, args=(check,), name=name, daemon=True).start()
        deadline = self._clock.monotonic() + seconds
        found: dict[str, CheckResult] = {}
        with contextlib.suppress(queue.Empty):
            for _ in checks:
                result = results.get(timeout=max(0.0, deadline - self._clock.monotonic()))
                found[result.check] = result
        return found

    def _put_up(self, result: CheckResult) -> None:
        if result.verdict == "fail":
            self._failing.add(result.check)
        elif result.verdict == "pass":
            self._failing.discard(result.check)
        if self._outbox.result(result):
            level = logging.WARNING if result.verdict == "fail" else logging.INFO
            log.log(level, "%s: %s: %s", result.check, result.verdict, result.text)


def checks_of(settings: Config, own: tuple[Check, ...] | None = None) -> tuple[Check, ...]:
    """Return the checks of this node: ours, the site's, and that of its lifecycle scripts.

    Args:
        settings: of this node.
        own: the checks of checks.directory; None: it is read here.
    """
    disabled = settings.checks.disabled
    apart = (lifecycle_check.NAME, planned_loss.NAME, PROFILE)
    ours = check_registry.checks(tuple(name for name in disabled if name not in apart))
    notice = settings.agent.loss_notice
    if notice and planned_loss.NAME not in disabled:
        # Elsewhere it would wake sresd every few seconds for nothing.
        ours = (*ours, planned_loss.notice_check(notice))
    if settings.checks.profile and PROFILE not in disabled:
        ours = (*ours, _profile_check())
    if own is None:
        own = program_checks(settings.checks.directory, disabled, _logs(settings))
    programs = with_programs(ours, own)
    if lifecycle_check.NAME in disabled:
        return programs
    return (*programs, *lifecycle_check.checks_of_scripts(settings.lifecycle))


def _logs(settings: Config) -> Path | None:
    """Return the directory of the logs of the site's programs."""
    health_log = log_path(settings.agent, dict(os.environ))
    return health_log.parent / "checks" if health_log else None


def context(settings: Config, facts: SlurmFacts, again: bool = False) -> CheckContext:
    """Return what the checks are given: settings, and what Slurm expects of this node."""
    node = facts.ask_node(again)
    # Slurm's RealMemory is 1 where it was never set: that expects nothing.
    memory = node.memory if node and node.memory > 1 else None
    profile = _profile(settings.checks.profile).profile
    expected = Expected(memory, gpus(node.gres) if node else None, profile)
    return CheckContext(Path(settings.agent.sysroot), settings.checks, expected)


def _profile_check() -> Check:
    """Return the check that tells people of a profile that cannot be read."""

    def probe(context: CheckContext) -> str:
        return _profile(context.settings.profile).fault

    def judge(fault: str, context: CheckContext) -> Judgement:
        if not fault:
            return Judgement(f"{context.settings.profile} is what the hardware is compared with")
        text = f"checks.profile expects nothing until sresd is started anew: {fault}"
        return Judgement(text, (Finding(PROFILE, Severity.MONITOR, text, context.now),))

    return Check(PROFILE, probe, judge, asks_for=(Severity.MONITOR,))


class LoadedProfile(NamedTuple):
    """The profile of this node's type; one that cannot be read expects nothing."""

    profile: NodeProfile
    fault: str = ""


@functools.cache
def _profile(name: str) -> LoadedProfile:
    """Read a profile, once; a file in a child, because it may lie where reading hangs."""
    if not name:
        return LoadedProfile(NodeProfile())
    if name in shipped_profiles():
        return LoadedProfile(load_profile(name))
    end = run_tool([sys.executable, "-P", "-m", profile_files.__name__, name], PROFILE_SECONDS)
    answer = ProfileAnswer(fault=f"{name} does not answer within {PROFILE_SECONDS:g} s")
    if end is not None:
        try:
            answer = msgspec.json.decode(end.text, type=ProfileAnswer)
        except msgspec.MsgspecError:
            answer = ProfileAnswer(fault=f"the reader of {name} ended with {end.code}")
    if answer.profile is None:
        log.warning("checks.profile: %s", answer.fault)
    return LoadedProfile(answer.profile or NodeProfile(), answer.fault)
