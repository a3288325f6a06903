"""A person has Slurm reboot a node (`scontrol reboot`) at any moment: sresctld waits for it."""

from __future__ import annotations

import pytest
from worlds import CONFIG, actions, agent, decision, incident, node, probes, world

from slurm_resilience.controller import actions as act
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.model import REPLACE

GONE = {"agents": (agent(silence=600.0),), "probes": {"n1": probes("silent", "silent")}}


@pytest.mark.parametrize(
    ("flag", "kind", "is_started"),
    [
        ("", "dead", True),
        ("+REBOOT_REQUESTED", "dead", False),
        ("+REBOOT_ISSUED", "dead", False),
        ("+REBOOT_ISSUED", "requested", True),
    ],
)
def test_no_repair_begins_while_slurm_reboots_the_node(
    flag: str, kind: str, is_started: bool
) -> None:
    marked = node(state=f"DOWN+FAIL{flag}", reason=REPLACE)
    known = incident(state=NodeState.EMPTY, kind=kind)
    starts = actions(world(marked, incidents=(known,), **GONE), act.StartReplacement)
    assert bool(starts) is is_started


@pytest.mark.parametrize(("flag", "is_marked"), [("+REBOOT_ISSUED", False), ("", True)])
def test_what_slurm_adds_is_written_over_once_it_is_done(flag: str, is_marked: bool) -> None:
    noted = node(state=f"DOWN+FAIL{flag}", reason=f"{REPLACE} : reboot issued")
    seen = world(noted, incidents=(incident(state=NodeState.EMPTY),), **GONE)
    assert bool(actions(seen, act.MarkNode)) is is_marked


def test_the_reason_of_a_reboot_is_not_taken_for_an_old_one() -> None:
    """It stands on a node in service until Slurm begins; the node is the person's afterwards."""
    asked = node(state="IDLE+REBOOT_REQUESTED", reason="vendor on site")
    assert decision(world(asked)).notes == ()
    assert decision(world(node(reason="vendor on site"))).notes == (
        act.NoteStale("n1", "vendor on site"),
    )
    done = node(state="DOWN", reason="vendor on site : reboot issued : reboot complete")
    assert diagnose(world(done, **GONE), CONFIG)["n1"].kind == "held"
