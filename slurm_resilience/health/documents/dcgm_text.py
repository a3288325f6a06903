"""Judge what dcgmi prints besides the JSON of its diagnostic. Pure.

The table of `dcgmi diag` becomes the form of its JSON, and is judged like it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from slurm_resilience.health.documents.dcgm_diag import judge_dcgm_diag, severity_of_text
from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.model import Severity

_HEALTH = "Overall Health"
_CELLS = re.compile(r"^\|(?P<name>[^|]*)\|(?P<value>[^|]*)\|\s*$")
_STATUS = re.compile(r"^(?P<status>Pass|Fail|Warn|Skip)\b(?: - (?P<where>.*))?")
_HEALTH_WORDS = frozenset({"Healthy", "Warning", "Failure"})


def is_dcgm_table(text: str) -> bool:
    """Tell whether a text is the table of `dcgmi diag`."""
    return bool(re.search(r"^\| *Diagnostic +\| *Result +\|", text, re.M))


def judge_dcgm_table(text: str) -> DocumentReading:
    """Judge the table: a test a row, its warnings in the rows below it."""
    tests: list[dict[str, Any]] = []
    for line in text.splitlines():
        cells = _CELLS.match(line)
        if not cells:
            continue
        name, value = cells["name"].strip(), cells["value"].strip()
        status = _STATUS.match(value)
        if status and name:
            where = re.sub(r"^(?:All|GPUs?:?)\s*", "", status["where"] or "")
            result: dict[str, Any] = {"status": status["status"], "gpu_ids": where, "warnings": []}
            tests.append({"name": name, "results": [result]})
        elif tests and value and name in ("", "Warning", "Error"):
            _add_text(tests[-1]["results"][0]["warnings"], value, is_new=bool(name))
    return judge_dcgm_diag({"DCGM GPU Diagnostic": {"test_categories": [{"tests": tests}]}})


def _add_text(warnings: list[str], text: str, is_new: bool) -> None:
    """Add a warning, or the next piece of one that is broken over lines."""
    if is_new or not warnings:
        warnings.append(text)
    else:
        warnings[-1] += f" {text}"


def recognises_dcgm_health(data: object) -> bool:
    """Tell whether a JSON document is of `dcgmi health -c -j`."""
    return isinstance(data, dict) and _HEALTH in (data.get("body") or {})


def judge_dcgm_health(data: dict[str, Any]) -> DocumentReading:
    """Judge what DCGM's background watches saw."""
    overall = str(data["body"][_HEALTH].get("value", ""))
    if overall == "Healthy":
        return DocumentReading()
    said = [text for text in _texts(data["body"]) if text not in _HEALTH_WORDS]
    if overall not in _HEALTH_WORDS:
        return DocumentReading(unjudged=(f"DCGM says '{overall}' of its watches",))
    findings = [
        document_finding(
            "dcgm",
            severity_of_text(text) if overall == "Failure" else Severity.MONITOR,
            text,
            code="health",
            evidence=text,
        )
        for text in said or [f"DCGM's watches: {overall}"]
    ]
    return DocumentReading(tuple(findings))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
