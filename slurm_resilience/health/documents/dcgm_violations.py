"""Read what `dcgmi policy --reg` prints: a policy of DCGM's that a GPU has violated. Pure.

Each violation is some lines, of which the last one has the figure, and none names the GPU:

    Timestamp: Tue Mar 14 15:51:54 2017
    A double-bit ECC error has violated policy manager values.
    DBE error count: 1
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from slurm_resilience.health import xid
from slurm_resilience.health.documents.reading import document_finding
from slurm_resilience.health.documents.smi_judge import RETIRED_PAGES_LIMIT
from slurm_resilience.model import Finding, Severity

CHECK_NAME = "dcgm_policies"
_UNNAMED = "a GPU that DCGM does not name"


class PolicyLine(NamedTuple):
    """The last line of one kind of violation."""

    pattern: re.Pattern[str]
    code: str
    severity: Severity
    text: str
    """With the figure in place of `{}`."""


_LINES: tuple[PolicyLine, ...] = (
    PolicyLine(
        # Its Xid 48 and NVML's counter ask for the reset, which needs the GPU's address.
        re.compile(r"DBE error count: (\d+)"),
        "dbe",
        Severity.MONITOR,
        "{} double-bit errors",
    ),
    PolicyLine(
        re.compile(r"PCIe replay count: (\d+)"), "pcie", Severity.MONITOR, "{} PCIe replays"
    ),
    PolicyLine(
        re.compile(r"Temperature: (\d+)"), "thermal", Severity.MONITOR, "a GPU is hot: {} °C"
    ),
    PolicyLine(re.compile(r"Power: (\d+)"), "power", Severity.MONITOR, "a GPU takes {} W"),
    PolicyLine(
        re.compile(r"NVLink Counter value: (\d+)"), "nvlink", Severity.MONITOR, "{} NVLink errors"
    ),
    PolicyLine(re.compile(r"(An unknown error) has violated"), "unknown", Severity.MONITOR, "{}"),
)
ASKS_FOR = (Severity.REPLACE, Severity.MONITOR)
_SINGLE = re.compile(r"SBE page retirement count: (\d+)")
_DOUBLE = re.compile(r"DBE page retirement count: (\d+)")
_XID = re.compile(r"XID error (\d+) detected")


class ViolationReader:
    """Takes the lines in their order."""

    def __init__(self) -> None:
        self._single = 0

    def feed(self, line: str) -> Finding | None:
        """Return the finding of the violation that ends with this line; it bears no time."""
        if match := _XID.match(line):
            row = xid.judge(int(match[1]), "")
            text = f"Xid {row.code} on {_UNNAMED}: {row.meaning}"
            said = f"DCGM policy: {line.strip()}"
            return document_finding("xid", row.action, text, "", str(row.code), said)
        if match := _SINGLE.match(line):
            self._single = int(match[1])
        elif match := _DOUBLE.match(line):
            pages = self._single + int(match[1])
            asks = Severity.REPLACE if pages >= RETIRED_PAGES_LIMIT else Severity.MONITOR
            return _violation(asks, f"{pages} retired pages on a GPU", "retired_pages", line)
        for kind in _LINES:
            if match := kind.pattern.match(line):
                return _violation(kind.severity, kind.text.format(match[1]), kind.code, line)
        return None


def of_gpu(finding: Finding, gpu: str) -> Finding:
    """Return an Xid's finding with the address of its GPU."""
    text = finding.text.replace(_UNNAMED, f"GPU {gpu}")
    return msgspec.structs.replace(finding, subject=gpu, text=text)


def _violation(severity: Severity, text: str, code: str, line: str) -> Finding:
    return document_finding(CHECK_NAME, severity, f"DCGM policy: {text}", "", code, line)
