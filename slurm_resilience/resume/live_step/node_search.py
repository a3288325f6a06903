"""Look for nodes for lost seats while the others go on, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import TypeVar

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation import swap
from slurm_resilience.resume.allocation.taken_nodes import taken_by_person, words_on
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.classify import Cause
from slurm_resilience.resume.decide.plan import Plan, PlanFacts, plan
from slurm_resilience.resume.live_step.live_events import FoundNodes, StartSearch
from slurm_resilience.resume.live_step.losses import TAKEN_FOR_SPARE

T = TypeVar("T")
RETRY_SECONDS = 2.0
"""Until Slurm is asked again."""
STOP_SECONDS = 30.0
"""For a search that is stopped: it withdraws its request for nodes."""


class NodeSearch:
    """One search. `found` is set, and ``wake`` called, when it is over."""

    def __init__(
        self,
        search: Callable[[Event], FoundNodes | None],
        wake: Callable[[], None],
        start_thread: Callable[[Callable[[], None], str], threading.Thread],
    ) -> None:
        """
        Args:
            search: gets an event that is set when no answer is wanted any more.
            wake: called (in a thread) when the search is over.
            start_thread: runs it.
        """
        self.found: FoundNodes | None = None
        self.over = False
        self._search = search
        self._wake = wake
        self._stop = Event()
        self._thread = start_thread(self._run, "node-search")

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Withdraw the request for nodes."""
        self._stop.set()
        self._thread.join(timeout=seconds)

    def _run(self) -> None:
        try:
            self.found = self._search(self._stop)
        except SresError as error:
            self.found = FoundNodes(Plan("stop", str(error)))
        except Exception as error:
            # A mistake of ours: without an answer the seats would stay lost without a word.
            self.found = FoundNodes(Plan("stop", f"the search for a node failed: {error!r}"))
            raise
        finally:
            self.over = True
            self._wake()


def ask_until_answered(
    context: SupervisorContext, ask: Callable[[], T], others_go_on: Callable[[], bool], stop: Event
) -> T:
    """Ask Slurm, again and again while the others go on: they need no answer.

    Raises:
        SlurmError: Slurm does not answer, and the others do not go on; or ``stop`` is set.
    """
    told = False
    while True:
        try:
            return ask()
        except SlurmError as error:
            if stop.is_set() or not others_go_on():
                raise
            if not told:
                report.say(f"the others go on, and Slurm is asked again: {error}")
            told = True
            context.clock.wait(stop, RETRY_SECONDS)


def replace_nodes(
    context: SupervisorContext,
    wanted: StartSearch,
    others_go_on: Callable[[], bool],
    stop: Event,
) -> FoundNodes | None:
    """Get nodes in place of lost ones. None: they are not wanted any more.

    An idle node is waited for as long as the others go on; else for `resume.swap_wait`.

    Args:
        context: of the supervised srun.
        wanted: the lost nodes, and those that the step still has.
        others_go_on: tells whether the others step without them.
        stop: set when the nodes are not wanted any more.
    """
    allocation, limits = context.allocation, context.limits
    reasons = "; ".join(f"{lost.node}: {lost.reason}" for lost in wanted.lost)
    cause = Cause("node", reasons, tuple(lost.node for lost in wanted.lost))
    failed, unanswered = "", 0
    taken = tuple(lost.node for lost in wanted.lost if lost.reason == TAKEN_FOR_SPARE)
    while not stop.is_set():
        if ask_until_answered(context, allocation.refresh, others_go_on, stop) != "RUNNING":
            return FoundNodes(Plan("stop", "the job is over"))
        ask = partial(allocation.facts, wanted.step_size, failed, wanted.living_nodes)

        def decide(ask: Callable[[], PlanFacts] = ask) -> tuple[Plan, tuple[str, ...]]:
            if allocation.claims.are_shared:
                allocation.look()
            facts = ask_until_answered(context, ask, others_go_on, stop)
            facts = msgspec.structs.replace(facts, taken_nodes=taken)
            chosen = plan(cause, facts, (), limits)
            return chosen, (*wanted.living_nodes, *chosen.nodes)

        chosen = allocation.claims.choose(decide, wanted.living_nodes)
        if taken and chosen.kind == "stop":
            words = words_on(taken, allocation.id)
            return FoundNodes(chosen, taken=dict.fromkeys(taken, words))
        if chosen.kind != "join":
            return FoundNodes(chosen)
        try:
            added = _take(context, chosen, wanted, others_go_on, stop)
        except swap.NoIdleNode as error:
            # While the others go on they lose nothing by waiting; a requeue would cost their work.
            failed, unanswered = "" if others_go_on() else str(error), 0
            continue
        except (SlurmError, NotFound) as error:
            unanswered += isinstance(error, SlurmUnreachable)
            if isinstance(error, SlurmUnreachable) and unanswered < swap.TRIES:
                context.clock.wait(stop, RETRY_SECONDS)
                continue
            report.say(f"no exchange of nodes: {error}")
            failed = f"the exchange of nodes failed ({error})"
            continue
        if added is None:
            return None
        nodes = (*chosen.nodes, *added)[: len(wanted.lost)]
        return ask_until_answered(
            context, partial(_found, context, chosen, nodes), others_go_on, stop
        )
    return None


def find_spare(context: SupervisorContext, wanted: StartSearch) -> FoundNodes | None:
    """Return the spare that would be taken for a node, with nothing changed; None: there is none.

    Args:
        context: of the supervised srun.
        wanted: the node that may be lost, and those that the step still has.
    """
    lost = wanted.lost[0]
    cause = Cause("node", f"{lost.node}: {lost.reason}", (lost.node,))
    facts = context.allocation.facts(wanted.step_size, "", wanted.living_nodes)
    left = (*facts.left_nodes, lost.node)
    chosen = plan(cause, msgspec.structs.replace(facts, left_nodes=left), (), context.limits)
    if chosen.kind != "join" or chosen.take or not chosen.nodes:
        return None
    return _found(context, chosen, chosen.nodes[:1])


def check_nodes(context: SupervisorContext, wanted: StartSearch, stop: Event) -> FoundNodes:
    """Find out whether nothing is wrong with the nodes on which tasks died.

    Args:
        context: of the supervised srun.
        wanted: the nodes, and those that the step still has.
        stop: set when no answer is wanted any more.
    """
    chosen = Plan("join", "no node is at fault: again on the same node")
    if context.allocation.refresh() != "RUNNING":
        return FoundNodes(Plan("stop", "the job is over"))
    nodes = tuple(lost.node for lost in wanted.lost)
    booted = context.allocation.boot_times(nodes)
    bad = context.allocation.bad(set(nodes))
    taken = taken_by_person(context, booted, bad, stop) if bad else ()
    # They do not come back in exchange for others.
    context.allocation.suspects.update(taken)
    if taken and not _has_spares(context, wanted, taken):
        # Without a request for others: these would undo what the person did.
        words = words_on(taken, context.allocation.id)
        others = {name: reason for name, reason in bad.items() if name not in taken}
        return FoundNodes(chosen, bad=others, taken=dict.fromkeys(taken, words))
    if bad:
        return FoundNodes(chosen, bad=bad | dict.fromkeys(taken, TAKEN_FOR_SPARE))
    unfit = {lost.node: lost.reason for lost in wanted.unfit}
    if unfit and _has_others(context, wanted, tuple(unfit)):
        return FoundNodes(chosen, bad=unfit)
    return _found(context, chosen, nodes)


def _has_others(context: SupervisorContext, wanted: StartSearch, unfit: tuple[str, ...]) -> bool:
    """Return whether other nodes can be had now in place of these, in which the step goes on."""
    allocation = context.allocation
    living = tuple(name for name in wanted.living_nodes if name not in unfit)
    facts = allocation.facts(wanted.step_size, "", living)
    chosen = plan(Cause("node", "", unfit), facts, (), context.limits)
    return chosen.kind == "join" and allocation.idle_count() >= chosen.take


def _has_spares(context: SupervisorContext, wanted: StartSearch, taken: tuple[str, ...]) -> bool:
    """Return whether nodes that the job has anyway can take the place of these."""
    facts = context.allocation.facts(wanted.step_size, "", wanted.living_nodes)
    chosen = plan(Cause("node", "", taken), facts, (), context.limits)
    return chosen.kind == "join" and len(chosen.nodes) >= len(taken)


def _take(
    context: SupervisorContext,
    chosen: Plan,
    wanted: StartSearch,
    others_go_on: Callable[[], bool],
    stop: Event,
) -> tuple[str, ...] | None:
    context.allocation.left_nodes.update(chosen.leave)
    try:
        swap.shrink(context.allocation, chosen.leave)
    except SlurmError:
        # Slurm takes dead nodes out of the job by itself; on any other one tasks would run on.
        if not all(lost.dead for lost in wanted.lost):
            raise
    if not chosen.take:
        return ()
    return swap.grow(
        context.allocation,
        chosen.take,
        context.limits.swap_wait,
        stop,
        others_go_on,
        context.link.doubts,
    )


def _found(context: SupervisorContext, chosen: Plan, nodes: tuple[str, ...]) -> FoundNodes:
    context.allocation.refresh()
    known = {node.name: node.address or node.name for node in context.client.nodes()}
    addresses = {name: known.get(name, name) for name in nodes}
    job_nodes = context.allocation.in_slurms_order(context.allocation.nodes)
    return FoundNodes(chosen, nodes, addresses, job_nodes)
