"""Hunt: find a place for lost seats while the others go on. In a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import TypeVar

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.resume import exchange, report
from slurm_resilience.resume.classify import Cause
from slurm_resilience.resume.means import Means
from slurm_resilience.resume.plan import Plan, plan

T = TypeVar("T")
AGAIN = 2.0
"""Seconds until Slurm is asked again."""


class Found(msgspec.Struct, frozen=True):
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


class Hunt:
    """One search. `found` is set, and ``wake`` called, when it is over."""

    def __init__(self, search: Callable[[Event], Found | None], wake: Callable[[], None]):
        """
        Args:
            search: gets an event that is set when nobody wants the answer any more.
            wake: called (in a thread) when the search is over.
        """
        self.found: Found | None = None
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
            self.found = Found(Plan("stop", str(error)))
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
    means: Means,
    lost: Mapping[str, str],
    step_size: int,
    holds: Sequence[str],
    dead: bool,
    go_on: Callable[[], bool],
    stop: Event,
) -> Found | None:
    """Get nodes in place of lost ones. None: nobody wants them any more.

    Args:
        lost: the nodes, with the reasons.
        step_size: nodes that the training had.
        holds: those of them that it has.
        dead: all lost ones are dead: Slurm takes them out of the job by itself.
        go_on: do the others go on without them? Then idle nodes are waited for without limit.
        stop: set when nobody wants them any more.
    """
    allocation, limits = means.allocation, means.limits
    cause = Cause("node", "; ".join(f"{n}: {why}" for n, why in lost.items()), tuple(lost))
    failed = ""
    while not stop.is_set():
        if _asked(allocation.refresh, go_on, stop) != "RUNNING":
            return Found(Plan("stop", "the job is over"))
        ask = partial(allocation.facts, step_size, failed, tuple(holds))
        facts = _asked(ask, go_on, stop)
        chosen = plan(cause, facts, (), limits)
        if chosen.kind != "join":
            return Found(chosen)
        try:
            added = _take(means, chosen, dead, stop, go_on)
        except exchange.NoIdleNode as error:
            # Those who go on lose nothing by waiting; a requeue would cost them their work.
            failed = "" if go_on() else str(error)
            continue
        except SlurmUnreachable:
            stop.wait(AGAIN)
            continue
        except (SlurmError, NotFound) as error:
            report.say(f"no exchange of nodes: {error}")
            failed = f"the exchange of nodes failed ({error})"
            continue
        if added is None:
            return None
        nodes = (*chosen.nodes, *added)[: len(lost)]
        return _asked(partial(_at, means, chosen, nodes), go_on, stop)
    return None


def for_tasks(means: Means, nodes: Sequence[str]) -> Found:
    """Is nothing wrong with the nodes on which tasks died?"""
    chosen = Plan("join", "no node is at fault: again on the same node")
    if means.allocation.refresh() != "RUNNING":
        return Found(Plan("stop", "the job is over"))
    bad = means.allocation.bad(set(nodes))
    if bad:
        return Found(chosen, bad=bad)
    return _at(means, chosen, tuple(nodes))


def _take(
    means: Means, chosen: Plan, dead: bool, stop: Event, go_on: Callable[[], bool]
) -> tuple[str, ...] | None:
    try:
        exchange.shrink(means.allocation, chosen.leave)
    except SlurmError:
        if not dead:
            raise  # its tasks would run on
    if not chosen.take:
        return ()
    return exchange.grow(means.allocation, chosen.take, means.limits.swap_wait, stop, go_on)


def _at(means: Means, chosen: Plan, nodes: tuple[str, ...]) -> Found:
    means.allocation.refresh()
    known = {node.name: node.address or node.name for node in means.client.nodes()}
    addresses = {name: known.get(name, name) for name in nodes}
    job_nodes = means.allocation.in_slurms_order(means.allocation.nodes)
    return Found(chosen, nodes, addresses, job_nodes)
