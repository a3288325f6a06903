"""No false alarms: what healthy machines write is at most worth watching."""

from __future__ import annotations

import pytest
from ordinary_syslog import kinds, ordinary_lines

from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.health.replay.recognise import replay
from slurm_resilience.model import Severity

LINES = 10_000


def test_there_are_many_kinds_of_lines() -> None:
    assert len(set(kinds())) >= 150


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ordinary_lines_ask_for_nothing(seed: int) -> None:
    lines = list(ordinary_lines(LINES, seed))
    assert len(lines) == LINES
    result = replay("\n".join(lines))
    assert result.kind == "log"
    grave = [(one.verdict, one.evidence) for one in result.incidents if one.verdict != "monitor"]
    assert grave == []


def test_the_same_lines_through_the_kernel_log_ask_for_nothing() -> None:
    """sresd reads them as the kernel's own: a program may write to the kernel log, unmarked."""
    classifier = Classifier()
    found = [
        finding
        for at, line in enumerate(ordinary_lines(LINES, 4))
        for finding in classifier.feed(line, float(at))
    ]
    watched = (Severity.NONE, Severity.MONITOR)
    assert [one.evidence for one in found if one.severity not in watched] == []


def test_a_fault_among_them_is_found() -> None:
    lines = list(ordinary_lines(LINES, 5))
    stamp = lines[5000][:15]
    fault = f"{stamp} gpu5 kernel: NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."
    lines.insert(5001, fault)
    result = replay("\n".join(lines))
    assert result.verdict == "reboot"
    assert sum(one.verdict == "reboot" for one in result.incidents) == 1
