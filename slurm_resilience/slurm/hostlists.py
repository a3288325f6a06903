"""Hostlists, the way Slurm writes them, through ClusterShell's NodeSet. Pure.

Lists of one name, or of one name with numbers, are read and written here: to load NodeSet takes
longer than any other module, and the start of a supervised step would wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_resilience.errors import UsageError

# NodeSet also knows groups (@name), wildcards and set operators (!, &, ^): Slurm does not.
_SLURM_CHARACTERS = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_TOO_LONG = re.compile(r"\d{19}")
"""A number that no node has; Python refuses to read one of thousands of digits."""
_DIGITS = "0123456789"
_LONG = 19
"""Digits of a number that no node has."""
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
    numbered = _numbered(text)
    if numbered is not None and len(numbered) <= MAX_NODES:
        return numbered
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # late: few lists need it

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
    listed = list(names)
    folded = _folded(listed)
    if folded is not None:
        return folded
    from ClusterShell.NodeSet import NodeSet  # late, as above

    nodes = NodeSet()
    for name in listed:
        nodes.add(name)
    return str(nodes)


def _numbered(text: str) -> tuple[str, ...] | None:
    """Return the names of ``n1`` or ``n[1-3,7]``; None: it is another list, perhaps a wrong one.

    Args:
        text: of Slurm's characters alone.
    """
    head, bracket, tail = text.partition("[")
    if not head[:1].isalpha() or "," in head or "]" in head:
        return None
    if not bracket:
        return (head,)
    if head[-1].isdecimal() or tail.find("]") != len(tail) - 1:
        return None
    bounds = [part.split("-") for part in tail[:-1].split(",")]
    words = [word for pair in bounds for word in pair]
    width = _width(words)
    if width is None or max(map(len, bounds)) > 2:
        return None
    numbers: list[int] = []
    for pair in bounds:
        first, last = int(pair[0]), int(pair[-1])
        if last < first or (numbers and first <= numbers[-1]):
            return None
        numbers.extend(range(first, last + 1))
    return tuple(f"{head}{number:0{width}d}" for number in numbers)


def _folded(names: list[str]) -> str | None:
    """Fold names that differ in the number at their end alone; None: they are others."""
    heads = {name.rstrip(_DIGITS) for name in names}
    if len(heads) != 1:
        return None
    head = heads.pop()
    if not head[:1].isalpha() or not _SLURM_CHARACTERS.fullmatch(head):
        return None
    # A number within a name may be folded as well; a list is no name.
    if not set(head).isdisjoint(_DIGITS + ",[]"):
        return None
    words = [name[len(head) :] for name in names]
    if words == [""]:
        return head
    width = _width(words)
    if width is None:
        return None
    numbers = sorted({int(word) for word in words})
    starts = [n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    ends = [n for i, n in enumerate(numbers) if n == numbers[-1] or n + 1 != numbers[i + 1]]
    if len(numbers) == 1:
        return f"{head}{numbers[0]:0{width}d}"
    written = (
        f"{first:0{width}d}" + (f"-{last:0{width}d}" if last > first else "")
        for first, last in zip(starts, ends, strict=True)
    )
    return f"{head}[{','.join(written)}]"


def _width(words: list[str]) -> int | None:
    """Return how many digits each of these numbers has, 1 where they begin with no zero; None:
    one is no number, or a too long one, or some are filled up with zeros and have others beside
    them."""
    if not all(word.isdecimal() and len(word) < _LONG for word in words):
        return None
    widths = {len(word) for word in words}
    if len(widths) == 1:
        return widths.pop()
    return None if any(word[0] == "0" and word != "0" for word in words) else 1


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
