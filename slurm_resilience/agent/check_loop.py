"""The checks, round after round, in a thread of their own."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from slurm_resilience.agent.facts import SlurmFacts, gpus
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.errors import NotFound
from slurm_resilience.health import check_registry
from slurm_resilience.health.check import CheckContext, Expected
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.model import CheckResult

log = logging.getLogger("sresd.checks")


class CheckLoop:
    """Runs all checks every ``agent.check_interval`` seconds; the outbox takes the results."""

    def __init__(
        self,
        settings: Config,
        facts: SlurmFacts,
        outbox: Outbox,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._failing = False
        self._checks = check_registry.checks(settings.checks.disabled)
        self._runner = CheckRunner(self._checks, CheckContext(), clock)

    def run(self) -> None:
        """Run the thread."""
        while not self._stop.is_set():
            # What Slurm expects is read again while something fails: an administrator may have
            # taken the missing GPU out of slurm.conf, so that the node can go on without it.
            check_context = context(self._settings, self._facts, again=self._failing)
            self._failing = False
            self._runner.run(self._put_up, check_context)
            self._clock.wait(self._stop, self._settings.agent.check_interval)

    def run_now(self, name: str) -> CheckResult:
        """Run one check at once, beside the loop or between two of its checks.

        Raises:
            NotFound: this sresd has no such check.
        """
        for check in self._checks:
            if check.name == name:
                result = self._runner.run_one(check)
                self._put_up(result)
                return result
        known = ", ".join(check.name for check in self._checks)
        raise NotFound(f"this node has no check '{name[:50]}'; it has {known}")

    def _put_up(self, result: CheckResult) -> None:
        self._failing |= result.verdict == "fail"
        if self._outbox.result(result):
            level = logging.WARNING if result.verdict == "fail" else logging.INFO
            log.log(level, "%s: %s: %s", result.check, result.verdict, result.text)


def context(settings: Config, facts: SlurmFacts, again: bool = False) -> CheckContext:
    """Return what the checks are given: settings, and what Slurm expects of this node."""
    node = facts.ask_node(again)
    # Slurm's RealMemory is 1 where it was never set: that expects nothing.
    memory = node.memory if node and node.memory > 1 else None
    expected = Expected(memory, gpus(node.gres) if node else None)
    return CheckContext(Path(settings.agent.sysroot), settings.checks, expected)
