"""Judge the table of `dcgmi diag`. Pure.

It becomes the form of the diagnostic's JSON, and is judged like it.
"""

from __future__ import annotations

import re
from typing import Any

from slurm_resilience.health.documents.dcgm_diag import judge_dcgm_diag
from slurm_resilience.health.documents.reading import DocumentReading

_CELLS = re.compile(r"^\|(?P<name>[^|]*)\|(?P<value>[^|]*)\|\s*$")
_STATUS = re.compile(r"^(?P<status>Pass|Fail|Warn|Skip)\b(?: - (?P<where>.*))?")


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
