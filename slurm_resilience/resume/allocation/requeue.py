"""Requeue: the same job again, on other nodes."""

from __future__ import annotations

import threading
import time

from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.wire.messages import RequeueRequest


def requeue(
    allocation: Allocation,
    link: SupervisorLink,
    wake: threading.Event,
    reason: str,
    patience: float,
) -> None:
    """Ask sresctld, which also lifts Slurm's two minutes of waiting; else do it ourselves.

    The requeue ends this very process, so nothing after it may matter.

    Args:
        wake: set when there is news.
        patience: seconds that sresctld is given.
    """
    if link.connected.is_set():
        link.send(RequeueRequest(reason))
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            wake.clear()
            wake.wait(0.5)
            if allocation.refresh() != "RUNNING" or allocation.leave.is_set():
                return
    report.say("sresctld does not requeue the job: asking Slurm, which waits two minutes")
    allocation.client.requeue(allocation.id)
