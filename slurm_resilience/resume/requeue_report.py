"""Tell the reader of a requeued job's log which fault it was requeued for.

The supervisor of the start before ended with that start, and Slurm may have emptied its log:
sresctld's journal still knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slurm_resilience.errors import SresError
from slurm_resilience.model import Job
from slurm_resilience.resume import report
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.slurm.hostlists import fold

_CAUSES = ("requeue", "requeue-asked")


def cause_of(events: Iterable[dict[str, Any]], job: int) -> dict[str, Any] | None:
    """Return the event that requeued a job; None when the journal has none since its last start.

    Args:
        events: of the journal, newest first.
        job: the job's id.
    """
    cause = None
    for event in events:
        if event["job"] != job:
            continue
        if event["kind"] == "attempt-started":
            break
        if event["kind"] in _CAUSES:
            cause = event  # the oldest since that start: later ones follow from it
    return cause


def tell(link: SupervisorLink, job: Job, from_step: int, now: float) -> None:
    """Write the block, or one line where the cause is not known.

    Args:
        link: to sresctld, whose journal is asked.
        job: the job as it runs now.
        from_step: the last step that the program reported; -1: none.
        now: seconds since the epoch.
    """
    number = job.restarts + 1
    try:
        cause = cause_of(link.history(), job.id)
    except SresError:
        cause = None
    if cause is None:
        report.say(f"the job was requeued: this is its start number {number}")
        return
    seconds = max(0.0, now - cause["at"])
    report.requeued(number, cause["text"], fold(job.nodes), seconds, from_step)
