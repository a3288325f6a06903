"""Exchange nodes inside a running job: give the bad ones back, wait for idle ones, take them in."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation import Allocation

SALLOC_SECONDS = 5.0
"""How long one try for a node lasts; in between the supervisor looks around."""
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
    allocation: Allocation, count: int, patience: float, stop: threading.Event
) -> tuple[str, ...] | None:
    """Add nodes to the job; their names. None: ``stop`` was set while it waited for one.

    Args:
        count: how many.
        patience: seconds to wait for idle nodes.

    Raises:
        NoIdleNode: no node became idle in time.
        SlurmError: Slurm refuses.
        NotFound: the job is gone.
    """
    client = allocation.client
    began = time.monotonic()
    said = began
    have = set(client.job(allocation.id).nodes)
    while True:
        try:
            helper = client.allocate_for(allocation.job, count, SALLOC_SECONDS, stop)
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
                report.say(
                    f"waiting for {count} idle node(s) since {waited:.0f} s, for {patience:.0f} s "
                    f"at most: {why}"
                )
        if stop.is_set():
            return None
        # Also ends the wait when the job itself is gone (NotFound).
        client.job(allocation.id)
    try:
        nodes = client.merge(helper, allocation.id)
    except SresError:
        client.cancel_job(helper)
        raise
    return tuple(name for name in nodes if name not in have)
