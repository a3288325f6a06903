"""The table of all that is checked: the sources, the thresholds, and what each asks for."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from slurm_resilience.health import xid
from slurm_resilience.health.check import Check
from slurm_resilience.health.check_registry import BUILT_IN
from slurm_resilience.health.checks.host import planned_loss
from slurm_resilience.health.documents import dcgm_violations, smi_judge
from slurm_resilience.health.line_rules.line_judge import ALL_RULES
from slurm_resilience.health.line_rules.line_rule import LineRule
from slurm_resilience.health.verdict import (
    VERDICTS,
    HealthVerdict,
    gravest,
    verdict_of,
)

PACE_OF_LOG = "as it comes"
PACE_OF_CHECK = "agent.check_interval"


class CoverageRow(NamedTuple):
    """One check, one kind of kernel line, or the Xids that ask for the same."""

    name: str
    source: str
    threshold: str
    verdicts: tuple[HealthVerdict, ...]
    reason: str
    pace: str
    test: str

    @property
    def gravest(self) -> HealthVerdict:
        """The most that it asks for."""
        return gravest(self.verdicts)

    @property
    def words(self) -> tuple[str, str]:
        """Its name and what it looks for, as people read them."""
        if self.source != "kernel log":
            return self.name, self.threshold or self.source
        kind, _, rest = self.name.partition(" ")
        if kind == "Xid":
            return kind, rest
        text = f"{rest}: {self.reason}" if " " in rest else self.reason
        return kind, text if self.threshold == "any" else f"{text} ({self.threshold})"


def coverage_rows() -> tuple[CoverageRow, ...]:
    """Return all rows: the checks, the Xids, the other kinds of lines."""
    apart = (planned_loss.notice_check(""),)
    checks = map(_check, (*BUILT_IN, *apart))
    return (*checks, _events(), _policies(), *_xids(), *_DRIVER_LINES, *map(_line, ALL_RULES))


def _check(check: Check) -> CoverageRow:
    pace = PACE_OF_CHECK if check.period is None else f"{check.period:g} s"
    verdicts = tuple(map(verdict_of, check.asks_for))
    child = "in a process that can be killed" if check.in_child else "in a thread"
    return CoverageRow(
        check.name,
        check.source,
        check.threshold,
        verdicts,
        f"{child}, at most {check.timeout:g} s",
        pace,
        "tests/unit/test_health_checks*.py",
    )


def _events() -> CoverageRow:
    return CoverageRow(
        "gpu_events",
        "NVML's event set",
        "any Xid, as in the kernel log; the same within a second is one",
        tuple(dict.fromkeys(verdict_of(row.action) for row in xid.table().values())),
        "in a process that lives on, killed after 30 s without a beat",
        PACE_OF_LOG,
        "tests/unit/test_agent_gpu_events.py",
    )


def _policies() -> CoverageRow:
    return CoverageRow(
        dcgm_violations.CHECK_NAME,
        "dcgmi policy --reg",
        "any violation; an Xid as in the kernel log, one trouble with it; "
        f"{smi_judge.RETIRED_PAGES_LIMIT} retired pages",
        tuple(dict.fromkeys(verdict_of(one) for one in dcgm_violations.ASKS_FOR)),
        "dcgmi follows in a process that is started anew every 10 minutes",
        PACE_OF_LOG,
        "tests/unit/test_agent_dcgm_policies.py",
    )


_KERNEL_LINES_TEST = "tests/unit/test_health_kernel_log.py"
_DRIVER_LINES = tuple(
    CoverageRow(name, "kernel log", "any", verdicts, reason, PACE_OF_LOG, _KERNEL_LINES_TEST)
    for name, verdicts, reason in (
        (
            "Xid 154, with its text",
            (HealthVerdict.HEALTHY, HealthVerdict.RESET, HealthVerdict.REBOOT),
            "the driver's own word on the recovery comes before the table; None takes a reset back",
        ),
        (
            "Xid 144 to 150, Fatal",
            (HealthVerdict.RESET,),
            "the line's own word, fatal or not, comes before the table",
        ),
        (
            "SXid of an NVSwitch",
            (HealthVerdict.MONITOR, HealthVerdict.RESET),
            "the line's own word: a fatal one asks for a reset",
        ),
        (
            "GPU fallen off the bus, without an Xid",
            (HealthVerdict.REBOOT,),
            "a reboot brings a GPU back that fell off the bus",
        ),
        (
            "suspect_gpu",
            (HealthVerdict.MONITOR,),
            "programs of three users fault on it in four jobs, and on no other GPU of these jobs",
        ),
    )
)
"""Lines of the driver that `kernel_log` judges by their words."""


def _xids() -> list[CoverageRow]:
    rows = []
    by_action = sorted(xid.table().values(), key=lambda row: VERDICTS.index(verdict_of(row.action)))
    for action, same in groupby(by_action, key=lambda row: row.action):
        codes = ", ".join(str(row.code) for row in same)
        rows.append(
            CoverageRow(
                f"Xid {codes}",
                "kernel log",
                "any",
                (verdict_of(action),),
                "health/xid_table.csv names the source of each",
                PACE_OF_LOG,
                "tests/unit/test_health_kernel_log.py",
            )
        )
    return rows


def _line(rule: LineRule) -> CoverageRow:
    severities = dict.fromkeys((rule.severity, *(step.severity for step in rule.repeats)))
    ends = f"takes back {rule.check} {rule.clears}; " if rule.clears else ""
    return CoverageRow(
        f"{rule.check} {rule.code}",
        "kernel log",
        rule.threshold or "any",
        tuple(verdict_of(severity) for severity in severities),
        f"{ends}{rule.meaning}: {rule.source}",
        PACE_OF_LOG,
        "tests/data/rule_lines.toml",
    )
