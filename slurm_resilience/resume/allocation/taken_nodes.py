"""Find out which nodes a person took out of the job (`scontrol update JobId=… NumNodes=…`).

Slurm shows nothing of it but the job's nodes: the node stays up, unmarked, and its tasks are
killed. So Slurm's and sresctld's words on the node are looked at twice, with a pause between, and
its slurmd has to answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import Event
from typing import TYPE_CHECKING

from slurm_resilience.errors import SresError
from slurm_resilience.slurm.hostlists import fold

if TYPE_CHECKING:
    from slurm_resilience.resume.context import SupervisorContext

AGAIN_SECONDS = 3.0
"""Between the two looks. sresctld takes a dead node out of its jobs first, and sets it DOWN right
after; and it may be about to tell the supervisor."""


def taken_by_person(
    context: SupervisorContext, booted: Mapping[str, str], nodes: Collection[str], stop: Event
) -> tuple[str, ...]:
    """Return those of the nodes that nothing but a person has taken out of the job.

    Where that is not certain, or the job has another supervised srun, which exchanges nodes by
    itself: none.

    Args:
        context: of the supervised srun.
        booted: when each node had booted before.
        nodes: of its step.
        stop: set when no answer is wanted any more.
    """
    candidates = _taken(context, nodes, booted)
    if not candidates or context.clock.wait(stop, AGAIN_SECONDS):
        return ()
    return _taken(context, candidates, booted)


def words_on(nodes: Collection[str], job: int) -> str:
    """Return in words what became of nodes that a person took out of a job, and what to do.

    Args:
        nodes: their names.
        job: its number.
    """
    one = len(nodes) == 1
    is_are, it = ("is", "it") if one else ("are", "them")
    return (
        f"{fold(sorted(nodes))} {is_are} well, and not in job {job} any more: a person took {it} "
        f"out (scontrol update). To have {it} back, submit the job again"
    )


def _taken(
    context: SupervisorContext, nodes: Collection[str], booted: Mapping[str, str]
) -> tuple[str, ...]:
    allocation, client = context.allocation, context.client
    try:
        job = client.job(allocation.id)
        if job.state != "RUNNING" or job.restarts != allocation.job.restarts:
            return ()
        here = {*job.nodes, *allocation.companions.nodes, *allocation.left_nodes}
        gone = [name for name in nodes if name not in here]
        if not gone or allocation.claims.are_shared:
            return ()
        shown = {node.name: node for node in client.nodes()}
    except SresError:
        return ()
    # A node that was away and is back has booted, or sresctld knows of it.
    well = tuple(
        name
        for name in gone
        if name in shown
        and shown[name].is_available
        and not shown[name].reason
        and shown[name].boot_time == booted.get(name)
    )
    if not well:
        return ()
    doubts = {*context.link.doubts(well), *context.link.faulty()}
    answering = context.host_calls.look_at_ports([shown[name] for name in well]).answering
    return tuple(name for name in well if name in answering and name not in doubts)
