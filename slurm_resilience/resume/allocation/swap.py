"""Exchange nodes inside a running job: give the bad ones back, wait for idle ones, take them in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import Allocation

SALLOC_SECONDS = 5.0
"""How long the first try for a node lasts; in between the supervisor looks around. Later ones last
as long as it has waited: each is a job of its own in the site's accounting."""
LONGEST_SALLOC = 60.0
TRIES = 2
"""How often one exchange is tried when Slurm does not answer it, though it answers other calls: on
22.05 without slurmdbd every change of a job's size but the first times out, for good."""
STILL_WAITING = 60.0


class NoIdleNode(SlurmError):
    """None became idle in time."""


def shrink(allocation: Allocation, leave: Sequence[str]) -> None:
    """Give those of ``leave`` back that the job still has; Slurm ends the tasks on them."""
    gone = {name for name in leave if name in allocation.nodes}
    if gone:
        keep = [name for name in allocation.nodes if name not in gone]
        allocation.client.shrink(allocation.id, keep)


def grow(
    allocation: Allocation,
    count: int,
    patience: float,
    stop: threading.Event,
    others_go_on: Callable[[], bool] = lambda: False,
) -> tuple[str, ...] | None:
    """Add nodes to the job; their names. None: ``stop`` was set while it waited for one.

    Args:
        count: how many.
        patience: seconds to wait for idle nodes.
        others_go_on: then the caller has more of it than it says here.

    Raises:
        NoIdleNode: no node became idle in time.
        SlurmError: Slurm refuses.
        NotFound: the job is gone.
    """
    client = allocation.client
    began = time.monotonic()
    said = began
    while True:
        tried = time.monotonic() - began
        seconds = max(SALLOC_SECONDS, min(tried, LONGEST_SALLOC, patience - tried))
        try:
            helper = client.allocate_for(allocation.job, count, seconds, stop)
            break
        except (SlurmUnreachable, NotFound):
            raise
        except SlurmError as error:
            waited = time.monotonic() - began
            if waited > patience:
                raise NoIdleNode(f"no idle node within {waited:.0f} s") from error
            if time.monotonic() - said > STILL_WAITING or said == began:
                said = time.monotonic()
                why = "none is free" if "queued and waiting" in str(error) else str(error)
                until = "the others go on" if others_go_on() else f"for {patience:.0f} s at most"
                report.say(f"waiting for {count} idle node(s) since {waited:.0f} s, {until}: {why}")
            # Refused at once (a limit on submitted jobs): not asked again and again.
            stop.wait(max(0.0, began + tried + seconds - time.monotonic()))
        if stop.is_set():
            return None
        if allocation.refresh() not in ("RUNNING", "SUSPENDED"):
            raise NotFound(f"job {allocation.id} is over")
    try:
        # Not what the job has more than before: it may have lost one of the same name meanwhile.
        added = client.job(helper).nodes
        client.merge(helper, allocation.id)
    except SresError:
        client.cancel_job(helper)
        raise
    return allocation.in_slurms_order(added)
