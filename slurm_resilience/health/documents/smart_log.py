"""Judge the JSON of `smartctl -j` and `nvme smart-log -o json` of an NVMe disk. Pure.

The disk's own summary ("passed") is not enough: a disk without spare blocks still says it.
"""

from __future__ import annotations

from typing import Any

from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.model import Severity

WORN_PERCENT = 80
"""Part of its rated life from which a disk is watched."""
WORN_OUT_PERCENT = 100

_LOG = "nvme_smart_health_information_log"


def recognises_smart_log(data: object) -> bool:
    """Tell whether a JSON document is about the health of a disk."""
    if not isinstance(data, dict):
        return False
    return bool({_LOG, "smart_status", "smartctl"} & set(data)) or (
        isinstance(data.get("device"), dict) or {"critical_warning", "spare_thresh"} <= set(data)
    )


def judge_smart_log(data: dict[str, Any]) -> DocumentReading:
    """Return the findings on one disk."""
    device = data.get("device")
    name = str(device.get("name", "")) if isinstance(device, dict) else ""
    passed = (data.get("smart_status") or {}).get("passed")
    log = data.get(_LOG, data if "critical_warning" in data else None)
    if not isinstance(log, dict):
        if passed is False:
            failed = document_finding(
                "smart", Severity.REPLACE, f"{name}: the disk expects to fail", name, "status"
            )
            return DocumentReading((failed,))
        if passed is True:
            return DocumentReading(notes=(f"{name}: the disk says that it is well, and no more",))
        return DocumentReading(unjudged=(f"{name or 'the disk'}: its health log is missing",))

    def number(*keys: str) -> int:
        value = next((log[key] for key in keys if key in log), 0)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    spare = number("available_spare", "avail_spare")
    least = number("available_spare_threshold", "spare_thresh")
    used = number("percentage_used", "percent_used")
    warning = number("critical_warning")
    has_spare = "available_spare" in log or "avail_spare" in log
    faults = [
        (passed is False, "status", "the disk expects to fail", Severity.REPLACE),
        (
            has_spare and spare < least,
            "spare",
            f"{spare} % of its spare blocks are left, its own threshold is {least} %",
            Severity.REPLACE,
        ),
        (
            used > WORN_OUT_PERCENT,
            "worn_out",
            f"{used} % of its rated life is used (limit {WORN_OUT_PERCENT} %)",
            Severity.REPLACE,
        ),
        (
            # Bit 1 is the temperature, which a person can mend.
            bool(warning & ~0x2),
            "warning",
            f"it reports a critical warning, {warning:#04x}",
            Severity.REPLACE,
        ),
        (warning == 0x2, "temperature", "it is too hot", Severity.MONITOR),
        (
            WORN_PERCENT < used <= WORN_OUT_PERCENT,
            "worn",
            f"{used} % of its rated life is used (watched from {WORN_PERCENT} %)",
            Severity.MONITOR,
        ),
    ]
    return DocumentReading(
        tuple(
            document_finding("smart", severity, f"{name or 'disk'}: {text}", name, code)
            for holds, code, text, severity in faults
            if holds
        )
    )
