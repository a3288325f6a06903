"""The status in pages, and what of the journal is any user's to read. Pure."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from slurm_resilience.controller.query.private_jobs import PrivateJobs

PAGE_BYTES = 256 << 10
"""A page ends with the entry that makes it as large as this."""
_LISTS = ("nodes", "jobs")
"""The parts of the status that grow with the cluster."""
_OF_NO_NODE = {"version", "at", "uptime", "mode", "paused", "blind", "blind_since", "can_replace"}
_OF_NO_NODE |= {"can_reboot", "permits_expansion"}
"""The parts of the summary that name no node."""
PRIVATE_TEXT = "(root and SlurmUser can read it)"
_PRIVATE_DATA = frozenset({"output"})
_PRIVATE_KINDS = frozenset({"replacing"})
"""Events whose text is the replacement program's command line."""
_LAST_LINE = re.compile(
    r"^(?!Slurm's power saving |scontrol reboot |its sresd )"
    r"(.*? (?:exited -?\d+|disappeared|did not start)): "
    r"(?:.*(?=; (?:again in|given up|it is|Action:\w+ was) )|.*)",
    re.DOTALL,
)
"""The line that a program, or a third party's replacer, told last, in the text of an event. Slurm
and sresd tell of nothing but the node."""


class StatusPages:
    """A status, handed out in pages of bounded size."""

    def __init__(self, status: Mapping[str, Any], made: float = 0.0) -> None:
        """
        Args:
            status: as plain data.
            made: when (monotonic).
        """
        self._made = made
        self.summary = {name: part for name, part in status.items() if name not in _LISTS}
        self._lists: dict[str, Mapping[str, Any]] = {
            name: status[name] for name in _LISTS if name in status
        }

    @functools.cached_property
    def _order(self) -> list[tuple[int, str]]:
        """The entries of all lists, as pages have them; made when the first one is asked for."""
        parts = self._lists.values()
        return [(rank, key) for rank, part in enumerate(parts) for key in sorted(part)]

    def with_news(self, news: Mapping[str, Any]) -> StatusPages:
        """Return the same with other values in its summary."""
        return StatusPages({**self.summary, **self._lists, **news}, self._made)

    def with_age(self, data: dict[str, Any], moment: float) -> dict[str, Any]:
        """Return a page with the age of the status: the asker's clock may be another one, and the
        date may have been set.

        Args:
            data: of the page; only the one with the summary tells it.
            moment: now (monotonic).
        """
        return data | {"age": moment - self._made} if "at" in data else data

    def page(
        self, after: str = "", private: PrivateJobs | None = None
    ) -> tuple[dict[str, Any], str]:
        """Return a page, and what to ask the next one with.

        Args:
            after: what came with the page before; empty: the first page, which has the summary.
            private: the jobs that may be read about; None: all.
        """
        data: dict[str, Any] = {} if after else self.summary_for(private)
        data |= {name: {} for name in self._lists}
        names, size = list(self._lists), 0
        for index in range(self._index_after(after), len(self._order)):
            rank, key = self._order[index]
            content = self._lists[names[rank]][key]
            if private is not None:
                if names[rank] == "jobs" and not private.shows(int(key)):
                    continue
                content = private.of(content)
            entry = msgspec.Raw(msgspec.msgpack.encode(content))
            data[names[rank]][key] = entry
            size += len(entry) + len(key)
            if size >= PAGE_BYTES and index + 1 < len(self._order):
                return data, f"{rank}/{key}"
        return data, ""

    def of_jobs(self, jobs: Collection[int]) -> dict[str, Any]:
        """Return what tells of no node, but of those that some jobs have or had.

        Args:
            jobs: the jobs.
        """
        data = {name: part for name, part in self.summary.items() if name in _OF_NO_NODE}
        known = self._lists.get("jobs", {})
        shown = {str(job): known[str(job)] for job in jobs if str(job) in known}
        return data | {"sentence": "", "nodes": {}, "jobs": shown}

    def summary_for(self, private: PrivateJobs | None) -> dict[str, Any]:
        """Return what does not grow with the cluster.

        Args:
            private: the jobs that may be read about; None: all.
        """
        return dict(self.summary if private is None else private.of(self.summary))

    def _index_after(self, after: str) -> int:
        """Return where the next page begins. The status may be newer than the page before."""
        rank, _, key = after.partition("/")
        if not after:
            return 0
        return bisect.bisect_right(self._order, (int(rank), key)) if rank.isdecimal() else 0


def public_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of the journal as any user may read it.

    A replacement program's command line and output may hold what is not theirs.
    """
    hidden = {
        name: PRIVATE_TEXT if name in _PRIVATE_DATA else value
        for name, value in event["data"].items()
    }
    text = _LAST_LINE.sub(r"\1", event["text"])
    if event["kind"] in _PRIVATE_KINDS:
        text = PRIVATE_TEXT
    return event | {"text": text, "data": hidden}
