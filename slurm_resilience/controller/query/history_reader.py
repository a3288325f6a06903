"""Read the journal for `sres`, in whichever of the wire's threads asks."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import EventFilter
from slurm_resilience.controller.pages import PAGE_BYTES
from slurm_resilience.controller.query.observed_outcome import review_view
from slurm_resilience.controller.status import incident_view
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.slurm.hostlists import expand
from slurm_resilience.wire.messages import StatusRequest

MAX_ENTRIES = 1000
"""Entries in one answer."""

MAX_NODES, MAX_KINDS = 10_000, 50
"""Names in one question."""

MAX_HOSTLIST_CHARACTERS = 1000
"""Characters of the hostlist in one question. Names with several numbers in them take ever longer
to read: 15,000 characters took 18 s, in which no beat of a node is heard."""

MAX_NUMBER = 2**63 - 1
"""The largest that the journal can hold."""

Answer = tuple[dict[str, Any], str]
"""The data, and what to ask the next page with; empty: this was the last one."""


class HistoryReader:
    """Answers questions about the past from the journal's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # SQLite wants one connection for each thread.
        self._of_thread = threading.local()

    def read(self, request: StatusRequest) -> Answer:
        """Answer one question, newest first.

        Raises:
            SresError: the journal cannot be read, or the question makes no sense.
        """
        limit = max(0, min(request.limit, MAX_ENTRIES))
        try:
            return _read(self._journal(), request, limit)
        except sqlite3.Error as error:
            raise SresError(f"the journal cannot be read: {error}") from None

    def _journal(self) -> Journal:
        """Return this thread's own connection, to the file that lies there now."""
        known: Journal | None = getattr(self._of_thread, "journal", None)
        if known is not None and known.is_in_place:
            return known
        if not self._path.exists():
            # A question must not make an empty one in its place.
            raise SresError(f"the journal {self._path} is not there")
        if known is not None:
            known.close()
        self._of_thread.journal = journal = Journal(self._path)
        return journal


def _read(journal: Journal, request: StatusRequest, limit: int) -> Answer:
    if request.what == "history":
        return {"events": journal.events(request.node, limit)}, ""
    if max(request.job, request.incident) > MAX_NUMBER:
        raise UsageError("no job and no incident has so large a number")
    before = _number(request.after)
    if request.what == "review":
        faults = journal.observed(limit=limit, before=before)
        return _page("faults", [review_view(fault) for fault in faults], limit)
    if len(request.node) > MAX_HOSTLIST_CHARACTERS:
        raise UsageError(
            f"a hostlist of {len(request.node)} characters is too long "
            f"(limit {MAX_HOSTLIST_CHARACTERS}); ask for fewer nodes, or for all"
        )
    nodes = expand(request.node) if request.node else ()
    if len(nodes) > MAX_NODES or len(request.kinds) > MAX_KINDS:
        raise UsageError(f"at most {MAX_NODES} nodes and {MAX_KINDS} kinds in one question")
    if request.what == "events":
        which = EventFilter(nodes, request.kinds, request.job, request.incident, request.since)
        return _page("events", journal.find_events(which, limit, before), limit)
    if request.incident:
        return {"incidents": [incident_view(journal.incident(request.incident))]}, ""
    found = journal.find_incidents(nodes, is_open=request.is_open, limit=limit, before=before)
    return _page("incidents", [incident_view(incident) for incident in found], limit)


def _number(after: str) -> int:
    if after and not (after.isascii() and after.isdecimal() and len(after) < 19):
        raise UsageError(f"{after[:50]!r} is not what the page before ended with")
    return int(after or 0)


def _page(name: str, entries: Iterable[dict[str, Any]], limit: int) -> Answer:
    """Cut a page: it ends with the entry that makes it large enough.

    Args:
        name: of the entries.
        entries: newest first, each with its `id`; no more than ``limit``.
        limit: with fewer entries than this there are no others.
    """
    taken: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
        taken.append(entry)
        size += len(msgspec.msgpack.encode(entry))
        if size >= PAGE_BYTES:
            break
    is_last = len(taken) < limit and size < PAGE_BYTES
    return {name: taken}, "" if is_last or not taken else str(taken[-1]["id"])
