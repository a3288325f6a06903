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
from slurm_resilience.resume.history import AttemptHistory
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


def tell(link: SupervisorLink, job: Job, history: AttemptHistory, now: float) -> None:
    """Write the block, or one line where the cause is not known.

    Args:
        link: to sresctld, whose journal is asked.
        job: the job as it runs now.
        history: of this srun, from before the requeue.
        now: seconds since the epoch.
    """
    number = job.restarts + 1
    told = _told(link, job, history)
    if told is None:
        report.say(f"the job was requeued: this is its start number {number}")
        return
    at, text = told
    since = max(0.0, now - at)
    report.requeued(number, text, fold(job.nodes), since, history.last_step, history.lost)


def _told(link: SupervisorLink, job: Job, history: AttemptHistory) -> tuple[float, str] | None:
    try:
        cause = cause_of(link.history(), job.id)
    except SresError:
        cause = None
    if cause is not None:
        return cause["at"], cause["text"]
    # Without sresctld: what this srun itself wrote down.
    past = history.cause_of_requeue
    if past is not None and past.ending is not None:
        return past.ending.ended_at, past.cause
    return None
