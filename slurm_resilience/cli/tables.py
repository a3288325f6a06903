"""Lay out what people read: tables, times, and text that cannot play tricks on a terminal."""

from __future__ import annotations

import io
import json
import os
import pwd
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click

from slurm_resilience.clock import seconds_of

_WIDE = 4000
_FREE_TEXT = frozenset({"REASON", "TEXT", "NODES", "WOULD", "THEN"})
"""Columns that are broken over lines where the terminal is narrow; the others never are."""
_LONG_STATE = 16
_LEAST_TEXT, _TEXT_INDENT = 24, 4
"""Characters: free text that has less room stands under its row, so far from the left."""
_NARROWEST_TEXT = 10
"""Characters that it has at least, where it cannot stand there."""


def plain(value: object) -> str:
    """One line without control characters: reasons and outcomes are other people's text."""
    text = " ".join(str(value).split())
    return "".join(char if char.isprintable() else "?" for char in text)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], indent: int = 0) -> str:
    """Lines of a table, as wide as the terminal; one line a row where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width, shown = _width(), [[plain(cell) for cell in row] for row in rows]
    text_column = _cramped(columns, shown, width - indent)
    if text_column is not None:
        lines = _with_text_below(columns, shown, indent, text_column)
        if lines:
            return "\n".join(lines)
    made = Table(box=None, pad_edge=False, padding=(0, 1), header_style="")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column not in _FREE_TEXT)
    for cells in shown:
        for index, column in enumerate(columns):
            if width != _WIDE and column == "STATE" and len(cells[index]) > _LONG_STATE:
                cells[index] = cells[index].replace("+", "\n+")
        made.add_row(
            *(
                Text(cell, style_of(column, cell))
                for column, cell in zip(columns, cells, strict=True)
            )
        )
    paper = io.StringIO()
    colours = has_colour()
    Console(
        file=paper,
        width=max(width - indent, _least_room(columns, shown)),
        color_system="standard" if colours else None,
        force_terminal=colours,
        highlight=False,
    ).print(made)
    return "\n".join(" " * indent + line.rstrip() for line in paper.getvalue().splitlines())


def _least_room(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the characters that a line needs with no node's name cut off: where the terminal has
    fewer, it breaks the line itself."""
    room = 2 * (len(columns) - 1)
    for index, column in enumerate(columns):
        cells = (column, *(row[index] for row in rows))
        longest = max(len(part) for cell in cells for part in cell.split("\n"))
        room += min(longest, _NARROWEST_TEXT) if column in _FREE_TEXT else longest
    return room


def _cramped(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int | None:
    """Return the number of the only column of free text if the others leave it too little room."""
    of_text = [index for index, column in enumerate(columns) if column in _FREE_TEXT]
    if len(of_text) != 1 or width == _WIDE:
        return None
    others = [index for index in range(len(columns)) if index not in of_text]
    taken = sum(max(len(line[index]) for line in (columns, *rows)) + 2 for index in others)
    longest = max((len(row[of_text[0]]) for row in rows), default=0)
    return of_text[0] if width - taken < min(longest, _LEAST_TEXT) else None


def _with_text_below(
    columns: Sequence[str], rows: Sequence[Sequence[str]], indent: int, text_column: int
) -> list[str]:
    """Lines of a table that has each row's text under the row; none where a row has two lines."""
    kept = [index for index in range(len(columns)) if index != text_column]
    bare = [[row[index] for index in kept] for row in rows]
    lines = table([columns[index] for index in kept], bare, indent).splitlines()
    if len(lines) != 1 + len(rows):
        return []
    room, margin = _width() - indent - _TEXT_INDENT, " " * (indent + _TEXT_INDENT)
    below = (textwrap.indent(textwrap.fill(row[text_column], room), margin) for row in rows)
    pairs = zip(lines[1:], below, strict=True)
    return [lines[0], *(line for pair in pairs for line in pair if line)]


BAD = "bold red"
_BAD_WORDS = ("DOWN", "FAIL", "DRAIN", "dead", "sick", "gave-up", "quarantined", "wrong", "failed")
_DOUBTFUL = ("suspect", "held", "silent", "requested", "note", "alarm")
_COLOURED = frozenset({"STATE", "STATES", "HEALTH", "RESULT", "EVENT", "SRESD"})


def has_colour() -> bool:
    """Tell whether stdout is a terminal, and NO_COLOR is not set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def style_of(column: str, cell: str) -> str:
    """Return the style in which rich shows a cell: red for what is bad, yellow for what may be."""
    if column not in _COLOURED:
        return ""
    if any(word in cell for word in _BAD_WORDS):
        return BAD
    return "yellow" if any(word in cell for word in _DOUBTFUL) or "*" in cell else ""


def alert(text: str) -> str:
    """Return a text in red, where the terminal shows colours."""
    return click.style(text, fg="red", bold=True) if has_colour() else text


def field(title: str, text: object, indent: int = 0, *, alert: bool = False) -> str:
    """Return a line with its title in front; what does not fit the terminal goes below the text.

    Args:
        title: at most ten characters.
        text: other people's text is made harmless.
        indent: blanks in front.
        alert: show it in red.
    """
    start = f"{' ' * indent}{title:<11}"
    below = " " * len(start)
    lines = textwrap.fill(plain(text), _width(), initial_indent=start, subsequent_indent=below)
    return click.style(lines, fg="red", bold=True) if alert and has_colour() else lines


def heading(text: object) -> str:
    """Return a line above others; what does not fit the terminal is set in further than they."""
    return textwrap.fill(plain(text), _width(), subsequent_indent="    ")


def item(text: object) -> str:
    """Return a line of a list below its title; what does not fit the terminal is set in."""
    return textwrap.fill(plain(text), _width(), initial_indent="  ", subsequent_indent="    ")


def _width() -> int:
    """Return the terminal's width, or one so wide that nothing is broken where there is none."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return max(40, shutil.get_terminal_size((80, 24)).columns)
    return _WIDE


def tell(text: object) -> None:
    """Print a line of progress; other people's text is made harmless."""
    click.echo(plain(text), err=True)


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1))


def duration(seconds: float) -> str:
    """``7s``, ``12m``, ``5h``, ``3d``: one unit is enough to act on."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def clock_time(at: float, now: float) -> str:
    """Local time with tenths; with its date when that is not today's."""
    moment = datetime.fromtimestamp(at)
    text = f"{moment:%H:%M:%S}.{moment.microsecond // 100000}"
    return text if moment.date() == datetime.fromtimestamp(now).date() else f"{moment:%F} {text}"


def seconds_since(stamp: str, now: float) -> float | None:
    """Seconds since a time as Slurm prints it; None when it is not one."""
    try:
        return now - seconds_of(stamp)
    except ValueError:
        return None


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def count(number: int, word: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def next_in_words(act: dict[str, Any], now: float) -> str:
    """Return ``n7: replaced in 40s, because …, unless …``."""
    when = f"after {act['waits_for']}" if act["waits_for"] else f"in {duration(act['at'] - now)}"
    return f"{act['node']}: {act['what']} {when}, because {act['because']}, unless {act['unless']}"
