"""Hunt: find a place for lost seats while the others go on. In a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import TypeVar

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation import swap
from slurm_resilience.resume.context import Context
from slurm_resilience.resume.decide.classify import Cause
from slurm_resilience.resume.decide.plan import Plan, plan

T = TypeVar("T")
AGAIN = 2.0
"""Seconds until Slurm is asked again."""


class FoundNodes(msgspec.Struct, frozen=True):
    """What came of a hunt."""

    chosen: Plan
    """join; or what has to be done instead."""
    nodes: tuple[str, ...] = ()
    """One for each that was lost."""
    addresses: dict[str, str] = {}
    """Of the nodes."""
    job_nodes: tuple[str, ...] = ()
    bad: dict[str, str] = {}
    """Nodes that turned out to be at fault, with the reason."""


class NodeSearch:
    """One search. `found` is set, and ``wake`` called, when it is over."""

    def __init__(self, search: Callable[[Event], FoundNodes | None], wake: Callable[[], None]):
        """
        Args:
            search: gets an event that is set when nobody wants the answer any more.
            wake: called (in a thread) when the search is over.
        """
        self.found: FoundNodes | None = None
        self.over = False
        self._search = search
        self._wake = wake
        self._stop = Event()
        self._thread = threading.Thread(target=self._run, name="hunt", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """No answer is wanted any more: a request for nodes is withdrawn."""
        self._stop.set()
        self._thread.join(timeout=seconds)

    def _run(self) -> None:
        try:
            self.found = self._search(self._stop)
        except SresError as error:
            self.found = FoundNodes(Plan("stop", str(error)))
        finally:
            self.over = True
            self._wake()


def _asked(ask: Callable[[], T], go_on: Callable[[], bool], stop: Event) -> T:
    """Ask Slurm, again and again while the others go on: they need no answer.

    Raises:
        SlurmError: Slurm does not answer, and nobody goes on; or ``stop`` is set.
    """
    said = False
    while True:
        try:
            return ask()
        except SlurmError as error:
            if stop.is_set() or not go_on():
                raise
            if not said:
                report.say(f"the others go on, and Slurm is asked again: {error}")
            said = True
            stop.wait(AGAIN)


def for_nodes(
    context: Context,
    lost: Mapping[str, str],
    step_size: int,
    holds: Sequence[str],
    dead: bool,
    go_on: Callable[[], bool],
    stop: Event,
) -> FoundNodes | None:
    """Get nodes in place of lost ones. None: nobody wants them any more.

    Args:
        lost: the nodes, with the reasons.
        step_size: nodes that the training had.
        holds: those of them that it has.
        dead: all lost ones are dead: Slurm takes them out of the job by itself.
        go_on: do the others go on without them? Then idle nodes are waited for without limit.
        stop: set when nobody wants them any more.
    """
    allocation, limits = context.allocation, context.limits
    cause = Cause("node", "; ".join(f"{n}: {why}" for n, why in lost.items()), tuple(lost))
    failed, unanswered = "", 0
    while not stop.is_set():
        if _asked(allocation.refresh, go_on, stop) != "RUNNING":
            return FoundNodes(Plan("stop", "the job is over"))
        ask = partial(allocation.facts, step_size, failed, tuple(holds))
        facts = _asked(ask, go_on, stop)
        chosen = plan(cause, facts, (), limits)
        if chosen.kind != "join":
            return FoundNodes(chosen)
        try:
            added = _take(context, chosen, dead, stop, go_on)
        except swap.NoIdleNode as error:
            # Those who go on lose nothing by waiting; a requeue would cost them their work.
            failed = "" if go_on() else str(error)
            continue
        except (SlurmError, NotFound) as error:
            unanswered += isinstance(error, SlurmUnreachable)
            if isinstance(error, SlurmUnreachable) and unanswered < swap.TRIES:
                stop.wait(AGAIN)
                continue
            report.say(f"no exchange of nodes: {error}")
            failed = f"the exchange of nodes failed ({error})"
            continue
        if added is None:
            return None
        nodes = (*chosen.nodes, *added)[: len(lost)]
        return _asked(partial(_at, context, chosen, nodes), go_on, stop)
    return None


def for_tasks(context: Context, nodes: Sequence[str]) -> FoundNodes:
    """Is nothing wrong with the nodes on which tasks died?"""
    chosen = Plan("join", "no node is at fault: again on the same node")
    if context.allocation.refresh() != "RUNNING":
        return FoundNodes(Plan("stop", "the job is over"))
    bad = context.allocation.bad(set(nodes))
    if bad:
        return FoundNodes(chosen, bad=bad)
    return _at(context, chosen, tuple(nodes))


def _take(
    context: Context, chosen: Plan, dead: bool, stop: Event, go_on: Callable[[], bool]
) -> tuple[str, ...] | None:
    try:
        swap.shrink(context.allocation, chosen.leave)
    except SlurmError:
        if not dead:
            raise  # its tasks would run on
    if not chosen.take:
        return ()
    return swap.grow(context.allocation, chosen.take, context.limits.swap_wait, stop, go_on)


def _at(context: Context, chosen: Plan, nodes: tuple[str, ...]) -> FoundNodes:
    context.allocation.refresh()
    known = {node.name: node.address or node.name for node in context.client.nodes()}
    addresses = {name: known.get(name, name) for name in nodes}
    job_nodes = context.allocation.in_slurms_order(context.allocation.nodes)
    return FoundNodes(chosen, nodes, addresses, job_nodes)
