"""Judge the JSON of fio (`--output-format=json`). Pure."""

from __future__ import annotations

import errno
from typing import Any

from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.model import Severity

_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors of the place that was given, which say nothing of the disk."""


def recognises_fio(data: object) -> bool:
    """Tell whether a JSON document is a result of fio."""
    return isinstance(data, dict) and "fio version" in data and isinstance(data.get("jobs"), list)


def judge_fio(data: dict[str, Any]) -> DocumentReading:
    """Return a finding for each error of writing, reading or verifying."""
    jobs = [job for job in data["jobs"] if isinstance(job, dict)]
    if not jobs:
        return DocumentReading(unjudged=("the document holds no result of a job",))
    reading = DocumentReading()
    for job in jobs:
        reading = reading.plus(_judge(job))
    if not any(fio_rate(data, way) for way in ("read", "write")) and not reading.findings:
        return reading.plus(DocumentReading(unjudged=("nothing was written or read",)))
    return reading


def _judge(job: dict[str, Any]) -> DocumentReading:
    number = int(job.get("error") or 0)
    if not number:
        return DocumentReading()
    meaning = errno.errorcode.get(number, f"error {number}")
    if number in _ROOM:
        return DocumentReading(unjudged=(f"the place cannot be written to: {meaning}",))
    # fio's own verification ends with EILSEQ: what was read is not what was written.
    lost = number == errno.EILSEQ
    said = "data read back differ from what was written" if lost else f"input/output: {meaning}"
    severity = Severity.REPLACE if lost else Severity.REBOOT
    return DocumentReading((document_finding("disk_speed", severity, said, code=str(number)),))


def fio_rate(data: dict[str, Any], way: str) -> float:
    """Return MB/s of ``read`` or ``write`` over all jobs."""
    rates = (job.get(way, {}).get("bw_bytes", 0) for job in data["jobs"] if isinstance(job, dict))
    return sum(float(rate) for rate in rates) / 1e6
