"""Plan what comes after the end of a step: cause, facts and history in, a plan out. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.decide.budgets import (
    fault_of_program,
    node_that_fails,
    nodes_that_eat_attempts,
    pause_before_next,
    spent,
)
from slurm_resilience.resume.decide.classify import Cause, Ending
from slurm_resilience.slurm.hostlists import fold

SAME_JOB = ("relaunch", "swap", "companion")
"""Kinds of plans by which another attempt starts in this run of the job."""
NO_WAY_ON = ("done", "user", "job_over")
"""Kinds of causes after which nothing is started again."""


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of where other nodes come from."""

    companions: tuple[tuple[str, ...], ...] = ()
    """Nodes of each of the job's companions that runs."""
    companion_obstacle: str = "it gets no second allocation"
    """The reason for which the job can have no (further) companion; empty: it can."""
    taken_nodes: tuple[str, ...] = ()
    """Nodes that a person has taken out of the job: it gets none in their place."""
    domains: dict[str, str] = {}
    """Leaf switch or block of each node; empty: not known, or there is no choice."""


class PlanFacts(SourceFacts, frozen=True):
    """All that limits the ways on for a job."""

    job_nodes: tuple[str, ...]
    step_size: int
    """Nodes that the step needs."""
    has_gres: bool
    """GRES on the job or any of its nodes: Slurm cannot grow such an allocation."""
    permits_expansion: bool
    is_batch: bool
    requeue: bool
    """Slurm may requeue this job (not `--no-requeue`)."""
    batch_host: str = ""
    """The node that runs the batch script; empty for salloc."""
    swap_failed: str = ""
    """The reason for which a swap failed since the step ended; empty: none was tried."""
    living_nodes: tuple[str, ...] = ()
    """Nodes on which a living step runs; empty: the step has ended, or has to end."""
    seconds_left: float | None = None
    """Until the job's time limit; None: it has none, or it is not known."""
    input_lost: str = ""
    """The reason for which another attempt would not get the same standard input; empty: it
    would."""
    own_nodes: tuple[str, ...] = ()
    """Nodes of the step so far: what is kept of them is not moved without need."""
    busy_nodes: tuple[str, ...] = ()
    """Nodes on which other steps of the job run."""
    min_nodes: int = 0
    """The step may go on with so few nodes; 0: with no fewer than it has."""
    left_nodes: tuple[str, ...] = ()
    """Nodes of the job that cannot be used any more: an earlier attempt left them, or Slurm shows
    them down or failing."""


class Plan(msgspec.Struct, frozen=True):
    """The next thing to do, with its reason."""

    kind: Literal["relaunch", "swap", "companion", "requeue", "stop", "join"]
    """join: the step lives on, and another one fills its lost seats. companion: the job gets a
    second allocation beside its own."""
    reason: str
    leave: tuple[str, ...] = ()
    """Nodes that the job gives up."""
    take: int = 0
    """Nodes to be added."""
    nodes: tuple[str, ...] = ()
    """For a relaunch: where. Empty: wherever the step ran. For a join: those to use, before the
    added ones."""
    pause: float = 0.0
    """Seconds to wait before it is done."""
    avoid: tuple[str, ...] = ()
    """Nodes that are not used again, and not taken back in an exchange."""


class Supply(msgspec.Struct, frozen=True):
    """The source of the nodes that take the place of bad ones."""

    source: Literal["inside", "exchange", "companion", "none"]
    """inside: the allocation has enough; exchange: the job gives nodes back and takes others in;
    companion: a second allocation has them."""
    reason: str


def plan(
    cause: Cause, facts: PlanFacts, history: tuple[Ending, ...], limits: ResumeSettings
) -> Plan:
    """Return the cheapest way on that can work.

    Args:
        cause: why the last attempt ended.
        facts: what the job allows.
        history: every ending so far, the last one included.
        limits: `[resume]` of the configuration.
    """
    if cause.kind in NO_WAY_ON:
        return Plan("stop", cause.reason)
    eaters = nodes_that_eat_attempts(history, limits)
    chosen = _plan(cause, facts, history, limits, eaters)
    if eaters and chosen.kind not in SAME_JOB:
        # To do without them is no reason to give up what works.
        chosen = _plan(cause, facts, history, limits, ())
    left = facts.seconds_left
    if chosen.kind in SAME_JOB:
        if left is not None and left - chosen.pause < limits.time_margin:
            return Plan("stop", f"the job's time limit is {left:.0f} s away (resume.time_margin)")
        return msgspec.structs.replace(chosen, avoid=eaters)
    return chosen


def _plan(
    cause: Cause,
    facts: PlanFacts,
    history: tuple[Ending, ...],
    limits: ResumeSettings,
    eaters: tuple[str, ...],
) -> Plan:
    budget = spent(history, limits)
    if budget:
        return Plan("stop", budget)
    if facts.input_lost and not facts.living_nodes:
        return _without_input(cause, facts)
    here = tuple(name for name in eaters if name in facts.job_nodes)
    if cause.kind == "program":
        # One that it does not use is no reason to move.
        used = tuple(name for name in here if name in facts.own_nodes)
        return _after_program(cause, facts, history, limits, used)
    silent = tuple(n for past in history[-1:] for n in past.silent if n not in cause.nodes)
    if silent:
        both = msgspec.structs.replace(cause, nodes=(*cause.nodes, *silent))
        chosen = _without_eaters(both, facts, here)
        if chosen.kind == "relaunch" and len(chosen.nodes) >= facts.step_size:
            # There is a spare for it too. It costs an attempt if it goes on not to answer.
            why = f"{fold(silent)} does not answer, and is left as well"
            return msgspec.structs.replace(chosen, reason=f"{why}; {chosen.reason}")
    return _without_eaters(cause, facts, here)


def _without_eaters(cause: Cause, facts: PlanFacts, eaters: tuple[str, ...]) -> Plan:
    """Plan what to do about a node's fault, and leave nodes that eat attempts as well."""
    more = tuple(name for name in eaters if name not in cause.nodes)
    chosen = _after_node(msgspec.structs.replace(cause, nodes=(*cause.nodes, *more)), facts)
    if not eaters:
        return chosen
    why = f"too many attempts ended on {fold(eaters)} (resume.max_per_node), which is left out"
    return msgspec.structs.replace(chosen, reason=f"{why}; {chosen.reason}")


def _without_input(cause: Cause, facts: PlanFacts) -> Plan:
    # A requeue runs the whole script again, and so also what wrote the input.
    if cause.kind == "node" and facts.is_batch and facts.requeue:
        return Plan("requeue", f"{facts.input_lost}; the job is requeued")
    return Plan("stop", f"{facts.input_lost}, and is not there for another attempt")


def _after_program(
    cause: Cause,
    facts: PlanFacts,
    history: tuple[Ending, ...],
    limits: ResumeSettings,
    eaters: tuple[str, ...],
) -> Plan:
    reason = fault_of_program(history, limits)
    pause = pause_before_next(history, limits)
    suspect = node_that_fails(history)
    if reason and suspect in facts.job_nodes:
        chosen = _after_node(Cause("node", cause.reason, (suspect,)), facts)
        if chosen.kind in SAME_JOB:
            why = f"{suspect} was the only one to fail in each attempt, and is left"
            return msgspec.structs.replace(chosen, reason=f"{why}; {chosen.reason}")
    if reason:
        return Plan("stop", f"no node is at fault, and {reason}")
    if eaters:
        return _without_eaters(Cause("node", cause.reason), facts, eaters)
    silent = history[-1].silent
    if silent:
        chosen = _after_node(Cause("node", cause.reason, tuple(silent)), facts)
        if chosen.kind in SAME_JOB:
            why = "; ".join(f"{name} does not answer ({silent[name]})" for name in silent)
            reason = f"{why}, and is left; {chosen.reason}"
            return msgspec.structs.replace(chosen, reason=reason, leave=tuple(silent))
    held = {*facts.job_nodes, *(name for nodes in facts.companions for name in nodes)}
    gone = tuple(name for name in facts.own_nodes if name not in held)
    if gone:
        chosen = _after_node(Cause("node", cause.reason), facts)
        why = f"no node is at fault; the job has {fold(gone)} no more"
        return msgspec.structs.replace(chosen, reason=f"{why}; {chosen.reason}", pause=pause)
    again = "no node is at fault: again on the same nodes"
    if history[-1].not_launched or history[-1].was_busy:
        again = "it may pass: again on the same nodes"
    later = f"{again}, after a pause of {pause:.0f} s" if pause else again
    return Plan("relaunch", later, pause=pause)


def after_task(deaths: int, limits: ResumeSettings, in_all: int = 0) -> Plan:
    """Plan what to do about a task of a living step that died on a healthy node.

    Args:
        deaths: in a row on this seat, without a long life or without progress between them.
        limits: `[resume]` of the configuration.
        in_all: deaths on this seat in this attempt.
    """
    if deaths > limits.max_relaunches:
        return Plan("stop", f"it died {deaths} times in a row (resume.max_relaunches)")
    if in_all >= limits.max_attempts:
        return Plan("stop", f"it died {in_all} times (resume.max_attempts)")
    return Plan("join", "no node is at fault: again on the same node")


def _after_node(cause: Cause, facts: PlanFacts) -> Plan:
    unusable = {*cause.nodes, *facts.busy_nodes, *facts.left_nodes}
    usable = [name for name in facts.job_nodes if name not in unusable]
    # A companion that lost a node may have lost its batch script with it: it is given up.
    whole = [nodes for nodes in facts.companions if unusable.isdisjoint(nodes)]
    if usable:
        usable += [name for nodes in whole for name in nodes]
    # Ranks were placed for the lost node's switch or block.
    near = {facts.domains[name] for name in cause.nodes if name in facts.domains}

    def preferred(name: str) -> tuple[bool, bool]:
        return name not in facts.own_nodes, facts.domains.get(name) not in near

    # A stable order: what the step has first, then the others as Slurm sorts them.
    good = tuple(sorted(usable, key=preferred))
    leave = tuple(name for name in facts.job_nodes if name in cause.nodes)
    needed = max(0, facts.step_size - len(good))
    if needed and not facts.living_nodes and 0 < facts.min_nodes <= len(good):
        text = f"{len(good)} of {facts.step_size} nodes are left, --auto-resume-min-nodes="
        return Plan("relaunch", f"{text}{facts.min_nodes} allows it", leave, nodes=good)
    if needed and facts.taken_nodes:
        # A person's word: neither an exchange nor a requeue gets another one for it.
        text = f"{len(good)} of {facts.step_size} nodes are left, and no other is asked for"
        return Plan("stop", f"{text} in place of one that a person took out of the job")
    supplied = supply(facts, good, leave)
    if supplied.source == "none":
        if facts.is_batch and facts.requeue:
            return Plan("requeue", f"{supplied.reason}; the job is requeued")
        forbidden = "may not be requeued (--no-requeue)" if facts.is_batch else "is not a batch job"
        return Plan("stop", f"{supplied.reason}, and the job {forbidden}")
    if facts.living_nodes and not (facts.is_batch and facts.batch_host in leave):
        free = tuple(name for name in good if name not in facts.living_nodes)
        lost = facts.step_size - sum(name in good for name in facts.living_nodes)
        # One that the job has no more, and that is not known to be lost, has a search of its own.
        take = min(needed, len(cause.nodes))
        return Plan("join", supplied.reason, leave, take, nodes=free[:lost])
    if supplied.source == "inside":
        return Plan("relaunch", supplied.reason, leave, nodes=good[: facts.step_size])
    if supplied.source == "companion":
        return Plan("companion", supplied.reason, leave, needed, nodes=good)
    return Plan("swap", supplied.reason, leave, needed)


def supply(facts: PlanFacts, good: tuple[str, ...], leave: tuple[str, ...]) -> Supply:
    """Return where other nodes can come from.

    Args:
        facts: what the job allows.
        good: the job's nodes that are not at fault.
        leave: those that are.
    """
    if len(good) >= facts.step_size:
        return Supply("inside", _replacement(facts, good))
    obstacle = _swap_obstacle(facts, good, leave)
    needed = facts.step_size - len(good)
    if not obstacle:
        return Supply("exchange", f"{needed} of {facts.step_size} nodes to be exchanged")
    other = _companion_obstacle(facts, good, leave)
    if other:
        return Supply("none", obstacle if other == obstacle else f"{obstacle}, and {other}")
    text = f"{needed} of {facts.step_size} nodes to come from a second allocation"
    return Supply("companion", f"{obstacle}: {text}")


def _replacement(facts: PlanFacts, good: tuple[str, ...]) -> str:
    """Return in words which spares of the allocation take the place of which nodes."""
    chosen = good[: facts.step_size]
    fresh = [name for name in chosen if name not in facts.own_nodes]
    lost = [name for name in facts.own_nodes if name not in chosen]
    spares = len(good) - facts.step_size
    left = f"{len(good)} good nodes are in the allocation, {spares} to spare"
    return f"{fold(fresh)} takes the place of {fold(lost)}; {left}" if fresh and lost else left


def _companion_obstacle(facts: PlanFacts, good: tuple[str, ...], leave: tuple[str, ...]) -> str:
    if facts.living_nodes:
        return "a step that lives on has no second allocation"
    if not any(name in good for name in facts.job_nodes):
        return "no node of the job is left beside which it could have a second allocation"
    if facts.is_batch and facts.batch_host in leave:
        return f"{facts.batch_host} runs the batch script, and the job cannot go on without it"
    # An exchange that found no idle node in its time: a second allocation finds none either.
    return facts.swap_failed or facts.companion_obstacle


def _swap_obstacle(facts: PlanFacts, good: tuple[str, ...], leave: tuple[str, ...]) -> str:
    if facts.has_gres:
        return "Slurm cannot exchange nodes of a job on nodes with GRES"
    if not good:
        return "no node of the job is left"
    if facts.is_batch and facts.batch_host in leave:
        return f"{facts.batch_host} runs the batch script, and the job cannot go on without it"
    if not facts.permits_expansion:
        return "this site does not permit job expansion (SchedulerParameters)"
    return facts.swap_failed
