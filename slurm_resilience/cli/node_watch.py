"""`sres node watch`: a replacement, live."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import click

from slurm_resilience.cli.controller import ClusterView, ask, pass_cluster, whole_status
from slurm_resilience.cli.shared_options import NumberRange, config_option, hostlist_argument
from slurm_resilience.cli.tables import BAD, alert, clock_time, plain, style_of
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.errors import SresError, WireError
from slurm_resilience.model import Node
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import StatusRequest

POLL_SECONDS = 0.5
_RECENT = 200


class _Watched:
    """One node: which events were shown, and whether its trouble has ended."""

    def __init__(self, name: str, incident: int, after: int) -> None:
        self.name = name
        self.incident = incident
        """The open one; 0: it is yet to come."""
        self.after = after
        self.end: NodeState | None = None

    def take(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the events (newest first) that were not shown yet, oldest first."""
        new = [event for event in reversed(events) if event["id"] > self.after]
        for event in new:
            self.after = event["id"]
            if "state" not in event["data"]:
                continue
            state = NodeState(event["data"]["state"])
            if state.is_under_way:
                self.incident = self.incident or event["incident"]
            elif event["incident"] == self.incident:
                self.end = state
        return new


@click.command()
@hostlist_argument
@click.option("--timeout", type=NumberRange(min=0), help="Give up after this many seconds.")
@config_option
@pass_cluster
def watch(cluster: ClusterView, hostlist: str, timeout: float | None) -> None:
    """Follow nodes until they are back. Ctrl-C ends.

    A node that nothing happens to is waited for; so is a sresctld that is being restarted.
    """
    nodes = cluster.named(hostlist)
    deadline = SYSTEM_CLOCK.monotonic() + timeout if timeout is not None else float("inf")
    connection = cluster.connect()
    try:
        watched, paused = _begin(connection, nodes)
        quiet = [w.name for w in watched if not w.incident and not nodes[w.name].requested_action]
        if quiet:
            click.echo(f"{', '.join(quiet)}: nothing is under way; waiting for it", err=True)
        if paused:
            click.echo(f"sresctld is paused ({plain(paused)}): nothing goes on", err=True)
        while True:
            try:
                _show(watched, connection)
                pending = [entry.name for entry in watched if not entry.end]
                if not pending:
                    break
                _check_deadline(deadline, f"{', '.join(pending)}: not at an end")
                connection.receive(min(POLL_SECONDS, max(0.0, deadline - SYSTEM_CLOCK.monotonic())))
            except WireError as error:
                connection.close()
                connection = _reconnect(cluster, deadline, error)
    finally:
        connection.close()
    given_up = [entry.name for entry in watched if entry.end is NodeState.QUARANTINED]
    if given_up:
        raise SresError(f"{', '.join(given_up)}: sresctld gave up; a person must look")


def _begin(connection: Connection, listed: Mapping[str, Node]) -> tuple[list[_Watched], str]:
    """Read the present state of each node, and the reason of a pause of sresctld if there is one.

    History first, then the status: what ends in between is in neither's blind spot.
    """
    histories = {name: _history(connection, name) for name in listed}
    status = whole_status(connection)
    nodes = status.get("nodes", {})
    watched = []
    for name, events in histories.items():
        incident = incident_of(nodes.get(name, {}), listed[name])
        mine = [event["id"] for event in events if incident and event["incident"] == incident]
        newest = events[0]["id"] if events else 0
        watched.append(_Watched(name, incident, min(mine) - 1 if mine else newest))
    return watched, str(status.get("paused", ""))


def incident_of(view: Mapping[str, Any], listed: Node) -> int:
    """Return the incident of a node that is followed; 0: it is yet to come.

    Args:
        view: the node in the status: its open `incident`, or the one that sresctld `gave_up`.
        listed: the node as Slurm showed it before. If sresctld gave up before that, a person has
            asked anew since; if later, it gave up what is asked for.
    """
    gave_up = view.get("gave_up") or {}
    if not listed.reason_at or gave_up.get("reason_at", "") < listed.reason_at:
        gave_up = {}
    return int((view.get("incident") or gave_up).get("id", 0))


def _show(watched: list[_Watched], connection: Connection) -> None:
    """Show the news of all of them, in the order in which it happened."""
    new: list[dict[str, Any]] = []
    for entry in watched:
        if not entry.end:
            new += entry.take(_history(connection, entry.name))
    for event in sorted(new, key=lambda event: int(event["id"])):
        when = clock_time(event["at"], SYSTEM_CLOCK.now())
        line = f"{when}  {event['node']}  {event['kind']:<12} {plain(event['text'])}"
        click.echo(alert(line) if style_of("EVENT", event["kind"]) == BAD else line)


def _history(connection: Connection, name: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = ask(connection, StatusRequest("history", name, _RECENT))[
        "events"
    ]
    return events


def _reconnect(cluster: ClusterView, deadline: float, lost: WireError) -> Connection:
    click.echo(f"{lost}; waiting for it", err=True)
    clock, never = SYSTEM_CLOCK, threading.Event()
    while True:
        try:
            return cluster.connect()
        except WireError as error:
            _check_deadline(deadline, str(error))
            clock.wait(never, POLL_SECONDS)


def _check_deadline(deadline: float, seen: str) -> None:
    if SYSTEM_CLOCK.monotonic() > deadline:
        raise SresError(f"--timeout is over; {seen}")
