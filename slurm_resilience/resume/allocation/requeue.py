"""Requeue: the same job again, on other nodes."""

from __future__ import annotations

import threading

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.allocation.slurmctld_wait import ask_patiently
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.wire.messages import RequeueRequest

LOOK_SECONDS = 0.5
"""Between two looks whether sresctld has requeued the job."""


def requeue(
    allocation: Allocation,
    link: SupervisorLink,
    wake: threading.Event,
    reason: str,
    patience: float,
) -> None:
    """Ask sresctld, which also lifts Slurm's two minutes of waiting; else ask Slurm.

    Nothing is asked once the user has ended this. Slurm requeues a cancelled job too, so it is
    looked at once more.

    The requeue ends this very process, so nothing after it may matter.

    Args:
        allocation: the job.
        link: to sresctld.
        wake: set when there is news.
        reason: for the journal.
        patience: seconds that sresctld is given.

    Raises:
        SlurmUnreachable: slurmctld was away for longer than the allocation's patience.
        SlurmError: Slurm refuses.
    """
    clock = allocation.clock
    if not _may_be_requeued(allocation):
        return
    if link.connected.is_set():
        link.refusal = ""
        link.send(RequeueRequest(reason))
        deadline = clock.monotonic() + patience
        while clock.monotonic() < deadline and not link.refusal:
            wake.clear()
            clock.wait(wake, LOOK_SECONDS)
            if allocation.refresh() != "RUNNING" or allocation.user_stop.is_set():
                return
    why = f" ({link.refusal})" if link.refusal else ""
    report.say(f"sresctld does not requeue the job{why}: asking Slurm, which waits two minutes")
    now = f"scontrol update jobid={allocation.id} StartTime=now"
    # In the second of the requeue slurmd would take its new credential for the revoked one.
    report.say(
        f"{now} starts it at once, given by its owner when it has been PENDING for 2 s; given "
        "sooner it may end the job"
    )

    def order() -> None:
        # An order of which no answer came may have been carried out.
        if _may_be_requeued(allocation):
            allocation.client.requeue(allocation.id)

    try:
        ask_patiently(order, allocation.patience, clock, allocation.user_stop)
    except SlurmUnreachable:
        # SIGTERM: Slurm may just end the script of the job that it requeues.
        if not allocation.user_stop.is_set():
            raise


def _may_be_requeued(allocation: Allocation) -> bool:
    running = allocation.state_now() in ("RUNNING", "SUSPENDED")
    return running and not allocation.user_stop.is_set()
