"""The incident that `sres node watch` follows."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.cli.node_watch import incident_of
from slurm_resilience.model import Node

BEFORE, NOW, AFTER = (f"2026-11-27T13:00:0{second}" for second in (1, 2, 3))


@pytest.mark.parametrize(
    ("view", "reason_at", "followed"),
    [
        ({}, NOW, 0),
        ({"incident": {"id": 4}}, NOW, 4),
        ({"gave_up": {"id": 3, "reason_at": NOW}}, NOW, 3),
        ({"gave_up": {"id": 3, "reason_at": BEFORE}}, NOW, 0),  # asked for anew since
        ({"gave_up": {"id": 3, "reason_at": AFTER}}, NOW, 3),  # while the watch began
        ({"gave_up": {"id": 3, "reason_at": NOW}}, "", 0),  # a person has put it in order
        ({"gave_up": {"id": 3}}, NOW, 0),
        ({"incident": {"id": 4}, "gave_up": {"id": 3, "reason_at": NOW}}, NOW, 4),
    ],
)
def test_the_incident_that_is_followed(view: dict[str, Any], reason_at: str, followed: int) -> None:
    node = Node(name="n1", base="DOWN", reason_at=reason_at)
    assert incident_of(view, node) == followed
