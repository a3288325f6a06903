"""Exchange nodes inside a running job: give the bad ones back, wait for idle ones, take them in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.slurm.client import SLURMS_REASON, SlurmClient

Doubts = Callable[[tuple[str, ...]], Mapping[str, str]]
"""Tells, of some nodes, those that must not be taken now, and why."""

SALLOC_SECONDS = 5.0
"""Length of the first try for a node; in between the supervisor looks around. Later tries last as
long as it has waited: each is a job of its own in the site's accounting."""
LONGEST_SALLOC_SECONDS = 60.0
TRIES = 2
"""Tries of one exchange when Slurm does not answer it, though it answers other calls: on
22.05 without slurmdbd every change of a job's size but the first times out, for good."""
SAY_SECONDS = 60.0
"""Between two lines that a node is still waited for."""


class NoIdleNode(SlurmError):
    """No node became idle in time."""


def shrink(allocation: Allocation, leave: Sequence[str]) -> None:
    """Give those of ``leave`` back that the job still has; Slurm ends the tasks on them.

    Raises:
        SlurmError: Slurm refuses.
        NotFound: the job is over, or another run of it has begun, whose nodes are not ours to give.
    """
    if not set(leave) & set(allocation.nodes):
        return
    with allocation.claims.turn():
        try:
            _keep_others(allocation, leave)
        except SlurmUnreachable:
            raise
        except SlurmError:
            before = allocation.nodes
            allocation.look()
            if allocation.nodes == before:
                raise
            # Slurm had taken a node that was to be kept out of the job meanwhile.
            _keep_others(allocation, leave)


def _keep_others(allocation: Allocation, leave: Sequence[str]) -> None:
    # Another srun of the job may have got nodes since it was read.
    if not allocation.look():
        raise NotFound(f"job {allocation.id} is over, or was requeued")
    gone = {*leave} & {*allocation.nodes} - allocation.claims.taken_anew()
    if gone:
        keep = [name for name in allocation.nodes if name not in gone]
        allocation.client.shrink(allocation.id, keep)


def grow(
    allocation: Allocation,
    count: int,
    patience: float,
    stop: threading.Event,
    others_go_on: Callable[[], bool] = lambda: False,
    doubts: Doubts = lambda _: {},
) -> tuple[str, ...] | None:
    """Add nodes to the job; return their names. None: ``stop`` was set while it waited for one.

    Args:
        allocation: the job.
        count: how many.
        patience: seconds to wait for idle nodes.
        stop: set when they are not wanted any more.
        others_go_on: tells whether the caller will wait longer; the log then says so.
        doubts: asks about nodes before they are taken. Nodes die together (a rack, a switch), and
            Slurm notices it last.

    Raises:
        NoIdleNode: no node became idle in time.
        SlurmError: Slurm refuses.
        NotFound: the job is gone.
    """
    client, clock = allocation.client, allocation.clock
    began = clock.monotonic()
    told = began
    answered = False
    avoided: set[str] = set()
    while True:
        tried = clock.monotonic() - began
        seconds = max(SALLOC_SECONDS, min(tried, LONGEST_SALLOC_SECONDS, patience - tried))
        try:
            taken = _allocate(allocation, count, seconds, stop, avoided, doubts)
            if taken is not None:
                break
        except SlurmError as error:
            # Where Slurm has answered before, it is only away for a while.
            if isinstance(error, SlurmUnreachable) and not answered:
                raise
            answered = True
            # Those that fell silent may be back by now.
            avoided.clear()
            waited = clock.monotonic() - began
            if waited > patience:
                raise NoIdleNode(f"no idle node within {waited:.0f} s") from error
            if clock.monotonic() - told > SAY_SECONDS or told == began:
                told = clock.monotonic()
                why = _why(str(error))
                until = "the others go on" if others_go_on() else f"for {patience:.0f} s at most"
                report.say(f"waiting for {count} idle node(s) since {waited:.0f} s, {until}: {why}")
            # Refused at once (a limit on submitted jobs): not asked again and again.
            clock.wait(stop, max(0.0, began + tried + seconds - clock.monotonic()))
        if stop.is_set():
            return None
        if allocation.refresh() not in ("RUNNING", "SUSPENDED"):
            raise NotFound(f"job {allocation.id} is over")
    helper, added = taken
    with allocation.claims.turn(), _given_up_on_error(client, helper):
        _check_own_run(allocation)
        # Before the job has them: another srun of it would take them for nodes to spare.
        allocation.claims.add(added)
        client.merge(helper, allocation.id)
    return allocation.in_slurms_order(added)


def _why(error: str) -> str:
    """Return why a request got no node, in few words."""
    if SLURMS_REASON in error:
        return f"{SLURMS_REASON}{error.rpartition(SLURMS_REASON)[2].rstrip(')')}"
    return "none is free" if "queued and waiting" in error else error


def _check_own_run(allocation: Allocation) -> None:
    if not allocation.state_now():
        raise NotFound(f"job {allocation.id} is over, or was requeued")


def _allocate(
    allocation: Allocation,
    count: int,
    seconds: float,
    stop: threading.Event,
    avoided: set[str],
    doubts: Doubts,
) -> tuple[int, tuple[str, ...]] | None:
    """Return a helper job and its nodes. None: there is a doubt about one, which is ``avoided``
    from now on."""
    client = allocation.client
    excluded = (*allocation.excluded, *sorted(avoided | allocation.suspects))
    wanted = msgspec.structs.replace(allocation.job, excluded_nodes=excluded)
    helper = client.allocate_for(wanted, count, seconds, stop)
    with _given_up_on_error(client, helper):
        # Not what the job has more than before: it may have lost one of the same name meanwhile.
        added = client.job(helper).nodes
        doubtful = doubts(added)
        if not doubtful:
            return helper, added
        client.cancel_job(helper)
    avoided |= set(doubtful)
    for name, why in sorted(doubtful.items()):
        report.say(f"{name} is not taken: {why}")
    return None


@contextlib.contextmanager
def _given_up_on_error(client: SlurmClient, helper: int) -> Iterator[None]:
    """Cancel the helper where Slurm fails; the first error counts, else it ends at its limit."""
    try:
        yield
    except SresError:
        with contextlib.suppress(SresError):
            client.cancel_job(helper)
        raise
