"""Judge a line by the rules, and count the lines whose number matters. Pure."""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

from slurm_resilience.health.line_rules.accelerator_rules import ACCELERATOR_RULES
from slurm_resilience.health.line_rules.host_rules import KERNEL_RULES, MEMORY_RULES, PCIE_RULES
from slurm_resilience.health.line_rules.line_rule import LineRule
from slurm_resilience.health.line_rules.network_rules import ADAPTER_RULES, FILE_SERVER_RULES
from slurm_resilience.health.line_rules.storage_rules import STORAGE_RULES
from slurm_resilience.model import Severity

ALL_RULES: tuple[LineRule, ...] = (
    *MEMORY_RULES,
    *PCIE_RULES,
    *KERNEL_RULES,
    *STORAGE_RULES,
    *ADAPTER_RULES,
    *FILE_SERVER_RULES,
    *ACCELERATOR_RULES,
)
RULES_BY_KEY = {(rule.check, rule.code): rule for rule in ALL_RULES}

MAX_COUNTED = 1024
"""Things whose lines are counted at once; the one that was quiet longest is forgotten first."""
MAX_REMEMBERED = 1024
"""Lines of one thing that are counted."""

AMOUNT_MOST, AMOUNT_DIGITS = 1_000_000, 8
"""More is not told apart: a line may have any number of digits, and Python makes no number of more
than 4,300."""

_HINTS = re.compile("|".join(re.escape(hint) for hint in sorted({r.hint for r in ALL_RULES})))


class RuleMatch(NamedTuple):
    """A line that a rule knows."""

    rule: LineRule
    subject: str
    severity: Severity
    times: int
    """Events of this kind on this subject that the severity rests on."""


class LineJudge:
    """Holds how often each line came lately."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], deque[tuple[float, int]]] = {}

    def judge(
        self, text: str, at: float, program: str = "", *, of_program: bool = False
    ) -> RuleMatch | None:
        """Return the rule that a line matches, and what it asks for; None: it says nothing.

        Args:
            text: one line, without its time and its author.
            at: when it was written, seconds.
            program: its author; empty for the kernel.
            of_program: the kernel tells of a user's program: no fault of the machine is looked for.
        """
        if not _HINTS.search(text):
            return None
        for rule in ALL_RULES:
            if rule.hint not in text or (program and program not in rule.programs):
                continue
            if of_program and rule.is_grave:
                continue
            if match := rule.pattern.search(text):
                groups = match.groupdict()
                named = (groups.get("subject"), groups.get("part"))
                subject = " ".join(part for part in named if part).lower()
                amount = min(int((groups.get("amount") or "1")[:AMOUNT_DIGITS]), AMOUNT_MOST)
                severity, count = self._with_repeats(rule, subject, at, amount)
                return RuleMatch(rule, subject, severity, count)
        return None

    def _with_repeats(
        self, rule: LineRule, subject: str, at: float, amount: int
    ) -> tuple[Severity, int]:
        if not rule.repeats:
            return rule.severity, amount
        key = (rule.check, rule.code, subject)
        lines = self._seen.pop(key, None) or deque(maxlen=MAX_REMEMBERED)
        self._seen[key] = lines  # at the end: the first is the one that was quiet longest
        if len(self._seen) > MAX_COUNTED:
            del self._seen[next(iter(self._seen))]
        lines.append((at, amount))
        severity, counted = rule.severity, amount
        for step in rule.repeats:
            count = sum(n for seen_at, n in lines if at - seen_at <= step.within_seconds)
            if count >= step.times:
                severity, counted = step.severity, count
        return severity, counted
