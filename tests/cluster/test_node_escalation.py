"""A fault that comes again, on real Slurm: reboot, then replace, then a person."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jobs import all_idle, events

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
XID = "NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus."


def health(lab: Lab, node: str) -> str:
    done = lab.run([str(own_bin() / "sres"), "node", "list", node, "--format", "json"])
    return str(json.loads(done.stdout)[0]["health"]) if done.stdout else ""


def of_kind(lab: Lab, kind: str) -> list[str]:
    return [event["text"] for event in events(lab) if event["kind"] == kind]


def test_a_reboot_then_a_replacement_then_a_person(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    # The limit of an hour, which would hold at the fourth repair too, is not looked at here.
    options = {"recovery": {"max_reboots": 1, "max_replacements": 1}, "replace": {"attempts": 9}}
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=options))
    for number, verb in enumerate(("reboot", "replace", "reboot"), 1):
        wait_for(lambda: all_idle(lab), 60, "every node is idle")
        wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
        lab.kmsg("n2", XID)
        wait_for(lambda n=number: len(of_kind(lab, "closed")) == n, 120, f"{verb} helps")
        assert of_kind(lab, "replacing")[-1].endswith(f"{verb} n2")
    # The new machine was rebooted once as well; the node has had its one replacement.
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    lab.kmsg("n2", XID)
    wait_for(lambda: of_kind(lab, "gave-up"), 60, "it is left to a person")
    assert "replaced once within 7 days already, a person must look" in of_kind(lab, "gave-up")[0]
    assert len(of_kind(lab, "replacing")) == 3
