"""The journal of the last active sresctld, before the first round of the next one."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.diagnose import is_out_of_service
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.journal_file import read_setting, write_setting
from slurm_resilience.controller.journal.records import IncidentFacts
from slurm_resilience.controller.standby.pair_states import Marker, Takeover
from slurm_resilience.model import Node
from slurm_resilience.replace.elsewhere import follow_copy, inherit
from slurm_resilience.slurm.node_labels import HEALTH, labels_of

log = logging.getLogger("sresctld.standby")

NUMBERS_AFTER = "numbers_after"
"""The setting of the journal with the highest id that no new incident gets."""
SKIPPED_NUMBERS = 1000
"""Incidents that the last active one may have opened without our knowledge: their runs have
directories on its disk, which must never be taken for those of ours."""


def take_over_runs(journal: Journal, state_dir: Path, own: str, marker: Marker | None) -> None:
    """Note the tries that the last active sresctld began on its machine.

    Raises:
        OSError: that cannot be written.
    """
    if marker is None or marker.host == own:
        return
    for incident in journal.incidents():
        if incident.state.is_running_program:
            run = f"{incident.id}-{incident.attempts}"
            if inherit(state_dir / "runs", run, marker.host, incident.times.run_started):
                log.info("%s: its replacement was begun on %s", incident.node, marker.host)


def follow_copied_runs(journal: Journal, state_dir: Path, own: str) -> None:
    """Note the tries of another machine, from which the state directory was copied. Here no process
    holds their locks, but there they may run still.

    Args:
        journal: ours.
        state_dir: sresctld's own directory.
        own: this machine's name.

    Raises:
        OSError: that cannot be written.
    """
    host = journal.host
    if host == own:
        return
    for incident in journal.incidents() if host else ():
        run = f"{incident.id}-{incident.attempts}"
        began = incident.times.run_started
        if incident.state.is_running_program and follow_copy(state_dir / "runs", run, host, began):
            log.warning("%s: its replacement was begun on %s", incident.node, host)
    journal.put_host(own)


def hold_possibly_begun(
    journal: Journal, nodes: Iterable[Node], takeover: Takeover, now: float
) -> tuple[str, ...]:
    """Leave every node to a person whose replacement may have been begun without our knowledge.

    These are the nodes that Slurm shows out of service with a request, and of whose replacement our
    journal does not know. A person who asks for it again is heard: his request has another time.

    Args:
        journal: ours.
        nodes: as Slurm shows them.
        takeover: why our journal is not whole.
        now: seconds since the epoch.

    Returns:
        Their names.
    """
    in_repair = {one.node for one in journal.incidents() if one.state.is_in_repair}
    doubtful = (node for node in nodes if node.name not in in_repair)
    return _leave_to_a_person(journal, doubtful, takeover.text, now)


def hold_forgotten(journal: Journal, nodes: Iterable[Node], now: float) -> tuple[str, ...]:
    """Leave every node to a person that an earlier sresctld had in hand, and of which the journal
    does not know: it was removed, or is an old copy. Its machine may be new already.

    The labels in the Comment tell: they are written once the journal has the incident, and taken
    off before it ends there. A request without them came while no sresctld ran, and is carried out.

    Args:
        journal: ours.
        nodes: as Slurm shows them.
        now: seconds since the epoch.

    Returns:
        Their names.
    """
    known = {one.node for one in journal.incidents()}
    forgotten = (
        node for node in nodes if node.name not in known and HEALTH in labels_of(node.comment)
    )
    text = "an earlier sresctld had it in hand, and this journal does not know of that"
    return _leave_to_a_person(journal, forgotten, text, now)


def _leave_to_a_person(
    journal: Journal, nodes: Iterable[Node], why: str, now: float
) -> tuple[str, ...]:
    """Give up those of these nodes that Slurm shows out of service with a request."""
    open_incidents = {incident.node: incident for incident in journal.incidents()}
    at_rest = {incident.node: incident for incident in journal.at_rest()}
    held = []
    text = f"{why}: its replacement may have been begun; look, then ask for it again"
    for node in nodes:
        if not (node.requested_action and is_out_of_service(node)):
            continue
        incident, rest = open_incidents.get(node.name), at_rest.get(node.name)
        if incident is None:
            if rest is not None and rest.reason_at == node.reason_at:
                continue
            incident = journal.open_incident(
                node.name, NodeEvent.REQUESTED, "requested", node.requested_action, text, now
            )
        if not incident.state.is_marked:
            incident = journal.apply(incident.id, NodeEvent.MARKED, text, now)
        if incident.state is not NodeState.EMPTY:
            incident = journal.apply(incident.id, NodeEvent.EMPTIED, text, now)
        # Given up, so that the same request opens no incident again.
        facts = IncidentFacts(reason_at=node.reason_at)
        journal.apply(incident.id, NodeEvent.GAVE_UP, text, now, facts)
        held.append(node.name)
    return tuple(held)


def skip_numbers(journal: Journal, db: sqlite3.Connection) -> None:
    """Give no incident an id any more, also after a restart, that the last active one may have
    given.

    Args:
        journal: ours.
        db: its connection.
    """
    newest = max((one.id for one in journal.incidents(open_only=False, limit=1)), default=0)
    write_setting(db, NUMBERS_AFTER, str(newest + SKIPPED_NUMBERS))


def skipped_numbers(db: sqlite3.Connection) -> int:
    """Return the highest id that no new incident gets; 0: any that is free."""
    return int(read_setting(db, NUMBERS_AFTER) or 0)
