"""`sresd --once`: every check one time, for people and for HealthCheckProgram."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from slurm_resilience.agent.check_loop import checks_of, context
from slurm_resilience.agent.drill_window import DrillWindow, drill_file
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.kernel_log_reader import KernelLogSource
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.grouping import FindingGroup, absorb
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.health.log_frame import record
from slurm_resilience.lifecycle.identity import boot_id
from slurm_resilience.model import FAULTY, CheckResult

OK, WARNING, CRITICAL = 0, 1, 2
"""Exit codes as Nagios reads them."""
ONE_LINE_CHARACTERS = 100_000
"""The width of a table that no person looks at: no row is broken."""
MOST_TOLD = 3
"""Kernel log findings in the line for people; all of them are in the result."""


def run(settings: Config, facts: SlurmFacts, clock: Clock) -> list[CheckResult]:
    """All results, the kernel log of this boot first."""
    results = [kernel_log(settings, clock)]
    CheckRunner(checks_of(settings), context(settings, facts), clock).run(results.append)
    return results


def exit_code(results: list[CheckResult]) -> int:
    """Critical: a finding that takes the node out of service. Warning: any other, or a check that
    could not judge."""
    if any(f.severity in FAULTY for result in results for f in result.findings):
        return CRITICAL
    return OK if all(result.verdict == "pass" for result in results) else WARNING


def kernel_log(settings: Config, clock: Clock) -> CheckResult:
    """Read what the kernel has logged since it booted. Only a device remembers that; a FIFO gives
    each line to its first reader, so it is left to the daemon."""
    path = Path(settings.agent.kernel_log)
    if path.is_fifo():
        return CheckResult("kernel_log", "unjudged", f"{path} is a FIFO: sresd follows it")
    try:
        source = KernelLogSource(path)
    except OSError as error:
        return CheckResult("kernel_log", "unjudged", f"{path} cannot be read: {error.strerror}")
    drill = DrillWindow(drill_file(), boot_id(), settings.agent.accept_injected, clock)
    classifier = Classifier(drill.is_always)
    booted = clock.now() - clock.monotonic()
    outbox = Outbox()
    incidents: tuple[FindingGroup, ...] = ()
    for line in source.read():
        is_drill = drill.covers(record(line).uptime)
        for finding in classifier.feed(line, clock.now(), booted, is_drill):
            change = absorb(incidents, finding)
            incidents = change.incidents
            outbox.change(change)
    source.close()
    findings = outbox.take_all().findings
    text = "; ".join(finding.text for finding in findings[-MOST_TOLD:])
    if len(findings) > MOST_TOLD:
        text = f"{len(findings)} findings, the last: {text}"
    text = text or f"{path} names no fault"
    return CheckResult("kernel_log", "fail" if findings else "pass", text, findings)


def as_json(node: str, results: list[CheckResult]) -> str:
    """Return one JSON document."""
    document = {"node": node, "exit_code": exit_code(results), "results": results}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def print_table(node: str, results: list[CheckResult]) -> None:
    """Print a table for people."""
    # Only here: the daemon does not carry rich in its memory.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("CHECK", "VERDICT", "ASKS FOR", "SECONDS", "WHAT", title=node, box=None)
    colours = {"pass": "green", "fail": "red", "unjudged": "yellow"}
    for result in results:
        verdict = Text(result.verdict, colours[result.verdict])
        asks = ", ".join(sorted({str(f.severity) for f in result.findings}))
        seconds, text = f"{result.seconds:.3f}", Text(_one_line(result.text))
        table.add_row(Text(result.check), verdict, asks, seconds, text)
    # A program that reads the table takes each line for a row.
    width = None if os.isatty(1) else ONE_LINE_CHARACTERS
    Console(width=width).print(table)


def _one_line(text: str) -> str:
    """Return a text without control characters: users name processes, files and mounts."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
