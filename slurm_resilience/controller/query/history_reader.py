"""Read the journal for `sres`, in whichever of the wire's threads asks."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.controller.journal import Journal
from slurm_resilience.controller.pages import PAGE_BYTES
from slurm_resilience.controller.query.observed_outcome import review_view
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.wire.messages import StatusRequest

MAX_ENTRIES = 1000
"""Entries in one answer."""

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
            if not hasattr(self._of_thread, "journal"):
                self._of_thread.journal = Journal(self._path)
            journal: Journal = self._of_thread.journal
            if request.what == "review":
                faults = journal.observed(limit=limit, before=_number(request.after))
                views = [review_view(fault) for fault in faults]
                return _page("faults", views, limit)
            return {"events": journal.events(request.node, limit)}, ""
        except sqlite3.Error as error:
            raise SresError(f"the journal cannot be read: {error}") from None


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
