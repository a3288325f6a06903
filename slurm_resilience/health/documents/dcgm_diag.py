"""Judge the JSON of `dcgmi diag -j`, of DCGM 3 and DCGM 4. Pure.

DCGM 4 gives each error a severity; its word decides. DCGM 3 gives at most an error's number, which
leads to the same severity, or only a text. A test that passes although it names an error that it
ran into did not run as it should: unjudged. Skipped tests are unjudged when no test ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.model import SEVERITIES, Severity

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
"""The key at the top: of version 4, of version 3."""

NONE, MONITOR, ISOLATE, UNKNOWN, TRIAGE, CONFIG, RESET = range(7)
"""DCGM's severities of an error, as its header numbers them."""

_NAMES = ("none", "monitor", "isolate", "unknown", "triage", "config", "reset")
_ASKS_FOR = {
    NONE: Severity.NONE,
    MONITOR: Severity.MONITOR,
    ISOLATE: Severity.REPLACE,
    UNKNOWN: Severity.MONITOR,
    TRIAGE: Severity.REBOOT,
    RESET: Severity.RESET,
}
_ISOLATE_IDS = frozenset(
    {3, 4, 7, 8, 13, 15, 24, 33, 35, 36, 38, 39, 52, 57, 58, 70, 71, 79, 80, 81, 86, 87, 88, 95}
    | {98, 102, 103, 104, 105, 106, 107, 109, 111}
)
_MONITOR_IDS = frozenset({5, 10, 11, 12, 16, 17, 19, 26, 27, 32, 34, 40, 41, 42, 43, 51, 53, 61})
_CONFIG_IDS = frozenset({18, 20, 23, 28, 29, 46, 47, 48, 55, 60, 68, 72, 78, 82, 96})
_RESET_IDS = frozenset({6, 25, 83, 84, 85})
_TRIAGE_IDS = frozenset({9, 14, 22, 30, 31, 37, 44, 45, 49, 50, 54, 56, 59, 62, 63, 64, 65, 66, 67})
"""Errors by number (DCGM's table, version 4), for documents that name no severity."""

_CONFIG_TESTS = re.compile(
    r"persistence|permission|environment|blacklist|denylist|library|graphics processes|software",
    re.IGNORECASE,
)
_BY_TEXT: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"persistence mode|environment variable|permission", re.I), CONFIG),
    (re.compile(r"remap\w* (?:has )?fail|fail\w* .*remap", re.I), ISOLATE),
    (re.compile(r"pending", re.I), RESET),
    (re.compile(r"double.bit|\bDBE\b|uncorrectable|miscompare|mismatch", re.I), ISOLATE),
    (re.compile(r"thermal|throttl|temperature", re.I), MONITOR),
)
_RAN = frozenset({"pass", "fail", "warn"})


class _Result(NamedTuple):
    test: str
    subject: str
    status: str
    warnings: tuple[dict[str, Any], ...]


def recognises_dcgm_diag(data: object) -> bool:
    """Tell whether a JSON document is a DCGM diagnostic."""
    return isinstance(data, dict) and any(isinstance(data.get(root), dict) for root in ROOTS)


def judge_dcgm_diag(data: dict[str, Any]) -> DocumentReading:
    """Return the findings of a diagnostic."""
    body = next(data[root] for root in ROOTS if isinstance(data.get(root), dict))
    if error := body.get("runtime_error") or data.get("runtime_error"):
        return DocumentReading(unjudged=(f"the diagnostic did not run: {error}",))
    results = list(_results(body))
    reading = DocumentReading()
    for result in results:
        reading = reading.plus(_judge(result))
    skipped = sum(result.status not in _RAN for result in results)
    if not results:
        return reading.plus(DocumentReading(unjudged=("the document holds no result of a test",)))
    if skipped == len(results):
        return reading.plus(DocumentReading(unjudged=(f"all {skipped} tests were skipped",)))
    if skipped:
        note = f"{skipped} of {len(results)} tests did not run, which says nothing of the node"
        return reading.plus(DocumentReading(notes=(note,)))
    return reading


def _results(body: dict[str, Any]) -> Iterator[_Result]:
    for category in _dicts(body.get("test_categories")):
        for test in _dicts(category.get("tests")):
            name = str(test.get("name", "?"))
            found = False
            for result in _dicts(test.get("results")):
                found = True
                yield _Result(name, _subject(result), _status(result), _warnings(result))
            summary = test.get("test_summary")
            if not found and isinstance(summary, dict):
                yield _Result(name, "", _status(summary), _warnings(summary))


def _judge(result: _Result) -> DocumentReading:
    if result.status not in _RAN:
        return DocumentReading()
    reading = DocumentReading()
    for warning in result.warnings:
        reading = reading.plus(_judge_warning(result, warning))
    if result.status == "fail" and not result.warnings:
        config = bool(_CONFIG_TESTS.search(result.test))
        severity = Severity.MONITOR if config else _by_test_name(result.test)
        text = f"{_title(result)} failed without a reason"
        finding = document_finding("dcgm", severity, text, result.subject, result.test)
        reading = reading.plus(DocumentReading((finding,)))
    if result.status == "warn" and not reading.findings:
        text = f"{_title(result)} warns"
        finding = document_finding("dcgm", Severity.MONITOR, text, result.subject, result.test)
        reading = reading.plus(DocumentReading((finding,)))
    return reading


def _by_test_name(test: str) -> Severity:
    for pattern, level in _BY_TEXT:
        if pattern.search(test):
            return _ASKS_FOR.get(level, Severity.MONITOR)
    return _ASKS_FOR[TRIAGE]


def _judge_warning(result: _Result, warning: dict[str, Any]) -> DocumentReading:
    said = str(warning.get("warning", "")).strip()
    level = _level(warning, said)
    text = f"{_title(result)}: {said or 'no text'} (DCGM: {_NAMES[level]})"
    if level == CONFIG:
        return DocumentReading(notes=(f"{text}: configuration, not hardware",))
    if result.status == "pass":
        if level in (ISOLATE, TRIAGE, RESET):
            return DocumentReading(unjudged=(f"{text}, yet the test passed: it did not run whole",))
        return DocumentReading(notes=(text,))
    severity = _ASKS_FOR[level]
    if result.status == "warn":
        severity = min(severity, Severity.MONITOR, key=SEVERITIES.index)
    code = str(warning.get("error_id", "")) or result.test
    return DocumentReading((document_finding("dcgm", severity, text, result.subject, code, said),))


def _level(warning: dict[str, Any], text: str) -> int:
    """Return DCGM's severity of an error: its own word, else by the number, else by the text."""
    level = warning.get("error_severity")
    if isinstance(level, int) and not isinstance(level, bool) and 0 <= level < len(_NAMES):
        return level
    number = warning.get("error_id")
    for ids, meant in (
        (_ISOLATE_IDS, ISOLATE),
        (_MONITOR_IDS, MONITOR),
        (_CONFIG_IDS, CONFIG),
        (_RESET_IDS, RESET),
        (_TRIAGE_IDS, TRIAGE),
    ):
        if number in ids:
            return meant
    return next((meant for pattern, meant in _BY_TEXT if pattern.search(text)), TRIAGE)


def _title(result: _Result) -> str:
    return f"{result.test} on {result.subject}" if result.subject else result.test


def _subject(result: dict[str, Any]) -> str:
    if "entity_id" in result:
        return f"{result.get('entity_group', 'GPU')} {result['entity_id']}"
    gpu = result.get("gpu_id", result.get("gpu_ids", ""))
    return f"GPU {gpu}" if gpu != "" else ""


def _status(result: dict[str, Any]) -> str:
    return str(result.get("status", "")).strip().lower()


def _warnings(result: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the warnings of a result: dictionaries in version 4, texts in older ones."""
    found = result.get("warnings", result.get("warning", ()))
    found = found if isinstance(found, list) else [found] if found else []
    return tuple(one if isinstance(one, dict) else {"warning": str(one)} for one in found)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
