"""The answer to a supervisor that asks about a node, and the choice of pyslurm."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import agent, dead, finding, incident, job, node, verdict, world

from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.status import for_supervisors
from slurm_resilience.model import REPLACE
from slurm_resilience.slurm.pyslurm import matches

BUSY = node(state="ALLOCATED")
SICK = {"agents": (agent(findings=(finding(),)),)}


@pytest.mark.parametrize(
    ("the_node", "more", "known", "word"),
    [
        (BUSY, SICK, None, "suspect"),
        (BUSY, SICK, incident(state=NodeState.SUSPECT), "suspect"),
        (BUSY, SICK, incident(state=NodeState.SET_ASIDE, kind="sick"), "sick"),
        (BUSY, dead(), None, "suspect"),
        (BUSY, dead(), incident(), "dead"),
        (node(state="ALLOCATED+FAIL", reason=REPLACE), {}, incident(), "requested"),
        (node(state="ALLOCATED+DRAIN", reason="Kill task failed"), {}, None, "unknown"),
        (node(state="DOWN", reason="Low RealMemory"), {}, None, "dead"),
        (node(state="ALLOCATED+DRAIN", reason="new disk"), {}, None, "unknown"),
        (BUSY, {"agents": (agent(),)}, None, "healthy"),
    ],
)
def test_only_what_everybody_must_leave(
    the_node: Any, more: dict[str, Any], known: Any, word: str
) -> None:
    """Paused, in mode none, or with too many at once nothing is marked: then no step may end."""
    seen = verdict(world(the_node, jobs=(job(),), **more))
    assert for_supervisors(seen, the_node, known).verdict == word


@pytest.mark.parametrize(
    ("pyslurm", "slurm", "good"),
    [
        ("22.5.3", "22.05.8", True),
        ("25.11.1", "25.11.0-rc1", True),
        ("25.11.1", "24.11.5", False),
        ("22.5.3", "22.5", True),
        ("", "22.05.8", False),
        ("22", "22.05.8", False),
    ],
)
def test_pyslurm_follows_slurms_major_version(pyslurm: str, slurm: str, good: bool) -> None:
    assert matches(pyslurm, slurm) is good
