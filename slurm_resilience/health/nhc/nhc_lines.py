"""Read a configuration of NHC: which of its lines are for this node, and their words. Pure.

A line is `TARGET || CHECK ARGUMENTS`. NHC runs the part behind `||` in a shell; here it is split
into words and never run, so a line that needs a shell is not judged.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from typing import NamedTuple

_VARIABLE = re.compile(r"(?:export\s+)?[A-Za-z_][A-Za-z0-9_]*=")
_SHELL = re.compile(r"\$[A-Za-z_{(]|`")
_OPERATORS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<"})
_RANGE = re.compile(r"(?P<before>[^\[\]]*)\[(?P<low>\d+)-(?P<high>\d+)\](?P<after>[^\[\]]*)")


class NhcLine(NamedTuple):
    """One line; ``problem``: why it cannot be judged."""

    number: int
    words: tuple[str, ...] = ()
    problem: str = ""


def parse_nhc(text: str, host: str) -> tuple[NhcLine, ...]:
    """Return the checks that a configuration has for one host.

    Args:
        text: the file. Its settings of variables are left out: they are NHC's own affair.
        host: as /proc/sys/kernel/hostname says it.
    """
    found = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        target, bars, command = (part.strip() for part in line.partition("||"))
        if not bars:
            found.append(NhcLine(number, problem="it has no '||'"))
        elif _applies(target, host) and not _VARIABLE.match(command):
            found.append(_line(number, command))
    return tuple(found)


def _applies(target: str, host: str) -> bool:
    try:
        return matches(target, host)
    except re.error:
        return True  # it is shown as a line that cannot be judged


def _line(number: int, command: str) -> NhcLine:
    try:
        words = tuple(shlex.split(command, comments=True))
    except ValueError as error:
        return NhcLine(number, problem=str(error))
    if not words:
        return NhcLine(number, problem="it names no check")
    if _OPERATORS & set(words) or any(_SHELL.search(word) for word in words):
        return NhcLine(number, words, "it needs a shell")
    return NhcLine(number, words)


def matches(pattern: str, text: str) -> bool:
    """Tell whether NHC's match string fits: a glob, `/regular expression/` or `{node[1-9],…}`; a
    `!` before it turns the answer round.

    Raises:
        re.error: the regular expression is none.
    """
    if pattern.startswith("!"):
        return not matches(pattern[1:], text)
    if len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/"):
        return re.search(pattern[1:-1], text) is not None
    if pattern.startswith("{") and pattern.endswith("}"):
        return any(_in_range(part, text) for part in pattern[1:-1].split(","))
    return fnmatch.fnmatchcase(text, pattern)


def _in_range(part: str, host: str) -> bool:
    match = _RANGE.fullmatch(part)
    if match is None:
        return part == host
    before, after = match["before"], match["after"]
    number = host[len(before) : len(host) - len(after)]
    if before + number + after != host or not number.isdecimal():
        return False
    return len(number) == len(match["low"]) and int(match["low"]) <= int(number) <= int(
        match["high"]
    )
