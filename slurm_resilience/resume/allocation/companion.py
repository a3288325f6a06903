"""Get nodes for a job in a second allocation beside it, and give that back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import (
    PROLOG_FAULT,
    SECOND,
    Allocation,
    Companion,
    is_drained_by_prolog,
)
from slurm_resilience.resume.allocation.swap import Doubts, NoIdleNode
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.slurm.client import SLURMS_REASON
from slurm_resilience.slurm.companion_job import (
    UNUSED_SECONDS,
    CompanionRequest,
    companion_name,
    is_companion,
)
from slurm_resilience.slurm.hostlists import fold

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.1, 2.0
"""Between two looks whether the companion has its nodes; ever longer."""
WAITED_PER_LOOK = 8
"""A look comes no later than by this part of the wait so far."""
EARLIER_SECONDS = 45.0
"""For companions of earlier runs to end: Slurm kills their tasks after KillWait, 30 s."""
LOOK_SECONDS = 0.5
"""Between two looks whether they have."""
SAY_SECONDS = 60.0
"""Between two lines that it is still waited for."""
MOST_ASKED = 5
"""Companions that are asked for in one incident: each got a node that fell silent."""
DRAIN_SECONDS = 1.0
"""From the end of a companion whose prolog failed until Slurm shows that node drained."""
GRANTED = ("RUNNING", "SUSPENDED")
WAITING = ("PENDING", "CONFIGURING")


class CompanionEnded(SlurmError):
    """A companion was ended by another one than its supervisor."""


class PrologFailed(CompanionEnded):
    """Slurm ended a companion, for one of its nodes on which the prolog failed."""


def obtain(
    allocation: Allocation,
    count: int,
    patience: float,
    per_node: tuple[str, ...],
    doubts: Doubts = lambda _: {},
) -> Companion | None:
    """Get a companion with so many nodes; None: the user ended this while it was waited for.

    Args:
        allocation: the job.
        count: nodes.
        patience: seconds to wait for them.
        per_node: sbatch's words for the memory and GPUs of each node.
        doubts: asks about nodes before they are used.

    Raises:
        NoIdleNode: Slurm gave none in time.
        CompanionEnded: the request was ended by a person, or by Slurm.
        SlurmError: Slurm refuses.
        NotFound: the job is over.
    """
    if allocation.companions.held:
        # They are not used meanwhile, and would end themselves.
        patience = min(patience, UNUSED_SECONDS / 2)
    deadline = allocation.clock.monotonic() + patience
    avoided: set[str] = set()
    for _ in range(MOST_ASKED):
        end_unknown(allocation)
        if not allocation.state_now():
            raise NotFound(f"job {allocation.id} is over, or was requeued")
        excluded = (*allocation.excluded, *sorted(avoided | allocation.suspects))
        job = msgspec.structs.replace(allocation.job, excluded_nodes=excluded)
        request = CompanionRequest(job, count, allocation.companions.supervisor, per_node)
        drained = _drained_by_prolog(allocation)
        number = allocation.client.ask_companion(request)
        try:
            companion = _wait(allocation, number, count, deadline, drained)
        except PrologFailed as error:
            # Slurm drains that node, and gives another one.
            report.say(str(error))
            release(allocation, number)
            continue
        except SresError:
            release(allocation, number)
            raise
        if companion is None:
            release(allocation, number)
            return None
        doubtful = doubts(companion.nodes)
        if not doubtful:
            over = [held.id for held in allocation.companions.held if allocation.is_over(held.id)]
            allocation.companions.held.append(companion)
            if over:
                raise CompanionEnded(f"{SECOND}, job {over[0]}, has ended meanwhile")
            return companion
        release(allocation, number)
        avoided |= set(doubtful)
        for name, why in sorted(doubtful.items()):
            report.say(f"{name} is not taken: {why}")
    raise NoIdleNode(f"each of {MOST_ASKED} second allocations had a node that is of no use")


def _wait(
    allocation: Allocation, number: int, count: int, deadline: float, drained: set[str]
) -> Companion | None:
    clock, began, told = allocation.clock, allocation.clock.monotonic(), float("-inf")
    shown: tuple[str, ...] = ()
    while True:
        state = "PENDING"
        nodes: tuple[str, ...] = ()
        try:
            found = allocation.client.job(number)
            if not is_companion(found, allocation.job, allocation.companions.supervisor):
                raise NotFound(f"job {number} is another one now")
            state, nodes = found.state, found.nodes
            shown = nodes or shown
        except NotFound:
            state = "gone"
        except SlurmUnreachable:
            pass  # it may have its nodes by now
        if state in GRANTED and len(nodes) == count:
            return Companion(number, allocation.in_slurms_order(nodes))
        if state not in (*GRANTED, *WAITING):
            meanwhile = _drained_by_prolog(allocation) - drained
            if not meanwhile:
                # slurmd gives the job up and drains its node by two messages.
                clock.wait(allocation.user_stop, DRAIN_SECONDS)
                meanwhile = _drained_by_prolog(allocation) - drained
            raise _end_of(number, shown, meanwhile)
        now = clock.monotonic()
        if now >= deadline:
            raise NoIdleNode(f"no second allocation within {now - began:.0f} s")
        if now - told > SAY_SECONDS and now > began:
            told = now
            left = f"{max(0.0, deadline - now):.0f} s more at most"
            name, why = _name(allocation), _waits_for(allocation, number)
            report.say(f"waiting for {count} node(s) in job {number} ({name}), {left}{why}")
        pause = max(FIRST_LOOK_SECONDS, min((now - began) / WAITED_PER_LOOK, LONGEST_LOOK_SECONDS))
        if clock.wait(allocation.user_stop, min(pause, max(0.0, deadline - now))):
            return None
        if allocation.refresh() not in ("RUNNING", "SUSPENDED"):
            raise NotFound(f"job {allocation.id} is over")


def _waits_for(allocation: Allocation, number: int) -> str:
    """Return what a companion waits for that a person may have to change; empty: nothing."""
    with contextlib.suppress(SresError):
        for found in allocation.client.companions(allocation.job):
            if found.id == number and found.needs_a_person:
                return f"; {SLURMS_REASON}{found.waits_for.strip()}"
    return ""


def _name(allocation: Allocation) -> str:
    supervisor = allocation.companions.supervisor
    return companion_name(allocation.id, allocation.job.restarts, supervisor)


def _end_of(number: int, nodes: Collection[str], drained: Collection[str]) -> CompanionEnded:
    """Return why a companion has ended that was waited for.

    Args:
        number: its job id.
        nodes: that Slurm has shown for it; none: it was gone too soon.
        drained: nodes that Slurm has drained meanwhile, because a prolog failed there.
    """
    own = sorted(set(drained) & set(nodes))
    if own:
        return PrologFailed(
            f"the prolog of {SECOND}, job {number}, failed on {fold(own)}, which Slurm drains"
        )
    text = f"{SECOND}, job {number}, was ended by another"
    if drained and not nodes:
        # Another job's prolog may have failed, and a person may have ended this one.
        text = f"{SECOND}, job {number}, has ended, as a prolog failed on {fold(sorted(drained))}"
    return CompanionEnded(text)


def _drained_by_prolog(allocation: Allocation) -> set[str]:
    """Return the nodes that Slurm drains because a prolog failed; none where it does not answer."""
    try:
        nodes = allocation.client.nodes()
    except SresError:
        return set()
    return {node.name for node in nodes if is_drained_by_prolog(node)}


def release(allocation: Allocation, number: int) -> None:
    """Give a companion back. Where Slurm is away, its own batch script does so a little later."""
    held = allocation.companions.held
    allocation.companions.held = [companion for companion in held if companion.id != number]
    try:
        allocation.client.cancel_job(number, _name(allocation))
    except (SlurmError, NotFound) as error:
        report.say(f"job {number} is left to end itself: {error}")


def release_unused(allocation: Allocation, nodes: tuple[str, ...]) -> None:
    """Give companions back of which the next attempt does not use every node."""
    for companion in tuple(allocation.companions.held):
        if not set(companion.nodes) <= set(nodes):
            report.say(
                f"the second allocation, job {companion.id} on {fold(companion.nodes)}, ends"
            )
            release(allocation, companion.id)


def release_all(allocation: Allocation) -> None:
    """Give every companion back: the program has ended, or the job is requeued."""
    for companion in tuple(allocation.companions.held):
        release(allocation, companion.id)


def end_unknown(allocation: Allocation) -> None:
    """End companions of this supervisor that it knows nothing of: Slurm's answer to a request may
    have been lost."""
    known = {companion.id for companion in allocation.companions.held}
    own = (allocation.job.restarts, allocation.companions.supervisor)
    with contextlib.suppress(SresError):
        for found in allocation.client.companions(allocation.job):
            if found.id not in known and (found.restarts, found.supervisor) == own:
                allocation.client.cancel_job(found.id)


def end_earlier(allocation: Allocation) -> None:
    """End companions that earlier runs of the job have left, and wait until they are gone.

    Tasks of an earlier attempt may run there. They may not write any more, whatever happens.
    """
    deadline = allocation.clock.monotonic() + EARLIER_SECONDS
    while allocation.clock.monotonic() < deadline:
        with contextlib.suppress(SresError):
            found = allocation.client.companions(allocation.job)
            left = [c.id for c in found if c.restarts != allocation.job.restarts]
            if not left:
                return
            for number in left:
                allocation.client.cancel_job(number)
        if allocation.clock.wait(allocation.user_stop, LOOK_SECONDS):
            return
    report.say("second allocations of an earlier run of this job may be there still: squeue shows")


def waits_in_vain(allocation: Allocation, step: SrunStep) -> bool:
    """Return whether an srun waits for tasks that never began: Slurm has ended its companion, as
    the prolog failed on a node of it. srun tells that its step was aborted, and waits for KillWait.

    Args:
        allocation: the job.
        step: an srun of the attempt.
    """
    if step.job in (0, allocation.id) or not (step.running and step.told_end.aborted):
        return False
    if step.ended_tasks or step.reports.has_begun or not step.reports.target:
        return False  # they may save their work
    ours = [companion for companion in allocation.companions.held if companion.id == step.job]
    bad = allocation.bad([name for companion in ours for name in companion.nodes])
    return any(why.startswith(PROLOG_FAULT) for why in bad.values())


def lost_with(allocation: Allocation, step: SrunStep) -> dict[str, str]:
    """Return the nodes that are lost with a companion's part of an attempt, with the reason.

    Where no node is at fault, no further companion is asked for: a person may have ended it.

    Args:
        allocation: the job.
        step: the srun of that part, which ended while others ran.
    """
    ours = [companion for companion in allocation.companions.held if companion.id == step.job]
    nodes = [name for companion in ours for name in companion.nodes]
    bad = allocation.bad(nodes)
    if any(not why.startswith(SECOND) for why in bad.values()) or step.failed_nodes:
        return bad
    if not bad and step.only_signalled:
        why = f"{SECOND}, job {step.job}, is being ended: Slurm has told its tasks to end"
        bad = dict.fromkeys(nodes, why)
    if not bad and (step.ended_tasks or step.cancelled):
        return {}
    if not bad:
        bad = dict.fromkeys(nodes, f"no step starts in {SECOND}, job {step.job}")
    allocation.companions.obstacle = f"{SECOND}, job {step.job}, was ended or could not be used"
    return bad
