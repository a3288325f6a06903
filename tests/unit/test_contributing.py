"""CONTRIBUTING.md names what exists: every folder of the package, every place to change."""

from __future__ import annotations

import re

from house import PACKAGE, ROOT
from test_imports import COMMON, MAY_IMPORT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.\w+)`")
"""A path in backticks: with a slash, or a file name with its suffix."""


def section(title: str) -> str:
    """Return the text of one section."""
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Return the rows of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_layout_has_a_row_for_every_folder() -> None:
    said = {name for row in rows("Layout") for name in re.findall(r"`(\w+)/`", row[0])}
    there = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert said == there


def test_the_layout_says_what_a_room_may_import() -> None:
    """As `MAY_IMPORT` has it: what is said here and what is checked there are the same."""
    for room, _, may_import in rows("Layout"):
        for name in re.findall(r"`(\w+)/`", room):
            said = set(re.findall(r"`(\w+)`", may_import))
            assert said == MAY_IMPORT[name] - COMMON, name


def test_where_to_change_names_places_that_exist() -> None:
    table = rows("Where do I change X?")
    assert len(table) >= 12
    missing = [
        f"{row[0]}: {place}"
        for row in table
        for place in PLACE.findall(" ".join(row[1:]))
        if not (PACKAGE / place).exists() and not (ROOT / place).exists()
    ]
    assert missing == []
    assert [row[0] for row in table if not PLACE.search(row[1])] == []
