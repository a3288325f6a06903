"""Hostlists, the way Slurm writes them, through ClusterShell's NodeSet. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetException

from slurm_resilience.errors import UsageError

# NodeSet also knows groups (@name), wildcards and set operators (!, &, ^): Slurm does not.
_SLURM_CHARACTERS = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_TOO_LONG = re.compile(r"\d{19}")
"""A number that no node has; Python refuses to read one of thousands of digits."""
MAX_NODES = 100_000


def expand(hostlist: str) -> tuple[str, ...]:
    """Return the names of a hostlist, in its own order: ``n[1-3]`` → ``("n1", "n2", "n3")``.

    Raises:
        UsageError: malformed, or empty.
    """
    text = hostlist.strip()
    if not _SLURM_CHARACTERS.fullmatch(text) or text.startswith("-"):
        raise UsageError(f"'{hostlist}' is not a hostlist; write names like n1 or n[1-3,7]")
    if _TOO_LONG.search(text):
        raise UsageError(f"'{hostlist[:100]}' has a number that is too long for a node's")
    if any(int(end) - int(start) >= MAX_NODES for start, end in _RANGE.findall(text)):
        raise UsageError(f"'{hostlist}' names more than {MAX_NODES} nodes")
    try:
        nodes = NodeSet(text)
    except NodeSetException as error:
        raise UsageError(f"'{hostlist}' is not a hostlist: {error}") from None
    try:
        count = len(nodes)
    except OverflowError:  # the product of many brackets
        raise UsageError(f"'{hostlist}' names more than {MAX_NODES} nodes") from None
    if not count or count > MAX_NODES:
        raise UsageError(f"'{hostlist}' names {count} nodes; write e.g. n1 or n[1-3,7]")
    return tuple(nodes)


def fold(names: Iterable[str]) -> str:
    """Fold names into a hostlist: ``["n1", "n2"]`` → ``n[1-2]``; empty for none."""
    nodes = NodeSet()
    for name in names:
        nodes.add(name)
    return str(nodes)


class LastNodeLists:
    """Expands hostlists, and remembers those of the last listing: in the next one most jobs hold
    the nodes that they held. One listing at a time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, ...]] = {}
        self._now: dict[str, tuple[str, ...]] = {}

    def begin(self) -> None:
        """Begin a listing, and forget what the last one did not have."""
        self._last, self._now = self._now, {}

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the names of a hostlist, as `expand` does.

        Raises:
            UsageError: malformed, or empty.
        """
        known = self._now.get(hostlist) or self._last.get(hostlist) or expand(hostlist)
        self._now[hostlist] = known
        return known
