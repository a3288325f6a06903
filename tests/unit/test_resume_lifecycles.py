"""The lifecycles in docs/architecture.md are those of the tables."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.resume.live_step.join_step import JOIN_TRANSITIONS
from slurm_resilience.resume.live_step.live_plan import LIVE_STEP_TRANSITIONS
from slurm_resilience.resume.live_step.live_steps import STEP_TRANSITIONS
from slurm_resilience.resume.live_step.losses import LOST_SEAT_TRANSITIONS

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PICTURE = re.compile(r"^```lifecycle (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^ (?P<states>\w+(?:, \w+)*) ─► (?P<following>\w+(?: \| \w+)*)(?:  .*)?$")
TABLES: dict[str, Any] = {
    "LOST_SEAT_TRANSITIONS": LOST_SEAT_TRANSITIONS,
    "JOIN_TRANSITIONS": JOIN_TRANSITIONS,
    "LIVE_STEP_TRANSITIONS": LIVE_STEP_TRANSITIONS,
    "STEP_TRANSITIONS": STEP_TRANSITIONS,
}


def pictures() -> dict[str, set[tuple[str, str]]]:
    found = {}
    for name, text in PICTURE.findall(PAGE.read_text(encoding="utf-8")):
        changes = set()
        for line in text.splitlines():
            match = LINE.match(line)
            assert match, f"{name}: {line!r} is not `state, state ─► state | state`"
            changes |= {
                (state, following)
                for state in match["states"].split(", ")
                for following in match["following"].split(" | ")
            }
        found[name] = changes
    return found


def test_every_table_has_its_picture() -> None:
    assert set(pictures()) >= set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_picture_shows_its_table(name: str) -> None:
    table: dict[Enum, frozenset[Enum]] = TABLES[name]
    assert pictures()[name] == {
        (state.value, following.value) for state in table for following in table[state]
    }
