"""Nodes are replaced by Slurm's power saving, and rebooted by `scontrol reboot`, on real Slurm."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from typing import Any

from jobs import all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin
from slurm_resilience.model import REBOOT, REPLACE

WaitFor = Callable[..., Any]
XID = "NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus."
POWER_SAVING = {"SuspendTime": "99999999", "SuspendTimeout": "4", "ResumeTimeout": "60"}


def power_saving_lab(**replace: Any) -> LabSpec:
    settings = {"by": "slurm-power", "program": [], "reboot_by": "slurm-reboot", **replace}
    options = {"replace": {**settings, "silent_for": 5.0, "backoff": 1.0}}
    return LabSpec(nodes=2, network=True, options=POWER_SAVING, sres_options=options)


def health(lab: Lab, node: str) -> str:
    done = lab.run([str(own_bin() / "sres"), "node", "list", node, "--format", "json"])
    return str(json.loads(done.stdout)[0]["health"]) if done.stdout else ""


def sres(lab: Lab, *words: str) -> Any:
    return json.loads(lab.run([str(own_bin() / "sres"), *words, "--format", "json"]).stdout)


def comment(lab: Lab) -> str:
    shown = lab.run(["scontrol", "show", "node", "n2", "-o"]).stdout
    return shown.partition(" Comment=")[2].strip()


def texts(lab: Lab, kind: str) -> list[str]:
    return [event["text"] for event in events(lab) if event["kind"] == kind]


class Story:
    """The events so far, for a test that fails."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __str__(self) -> str:
        lines = [f"{e['kind']} {e['node']} {e['text']}" for e in reversed(events(self._lab))]
        node = self._lab.run(["scontrol", "show", "node", "n2", "-o"]).stdout
        kept = [str(self._lab.status()["nodes"]["n2"])]
        for log in ("log/slurmctld.log", "nodes/n2/log/slurmd.log", "nodes/n2/log/slurmd.out"):
            with contextlib.suppress(OSError):
                kept += (self._lab.directory / log).read_text(errors="replace").splitlines()[-40:]
        return "\n".join(["it is back in service", *lines, node, *kept])


def ask(lab: Lab, node: str, reason: str) -> None:
    words = ["scontrol", "update", f"nodename={node}", "state=fail", f"reason={reason}"]
    lab.run(words, check=True)


def test_a_dead_node_is_replaced_by_power_saving(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    lab = fresh_lab(power_saving_lab())
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    before = lab.instance("n2")
    lab.power_off("n2")
    wait_for(lambda: texts(lab, "closed"), 120, Story(lab))
    assert lab.instance("n2") != before
    assert all_idle(lab)
    assert texts(lab, "replacing") == ["slurm-power replace n2"]
    done = [text.partition(":")[0] for text in texts(lab, "repairing")]
    # Slurm 26.05 leaves the Reason where it is.
    again = "writes the Reason that Slurm took away as it began to power the node up"
    assert done in (["state=power_up"], ["state=power_up", again])


def test_a_killed_sresctld_powers_a_node_down_once(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    lab = fresh_lab(power_saving_lab())
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    boots = lab.status()["nodes"]["n2"]["boots"]
    ask(lab, "n2", REPLACE)
    wait_for(lambda: "POWERING_DOWN" in lab.node_states()["n2"], 60, "it is being powered down")
    lab.kill_daemon("sresctld", signal.SIGKILL)
    wait_for(lambda: "POWERED_DOWN" in lab.node_states()["n2"], 60, "it is powered down")
    lab.start_daemon("sresctld")
    wait_for(lambda: "POWERING_UP" in lab.node_states()["n2"], 60, "it is being powered up")
    lab.kill_daemon("sresctld", signal.SIGKILL)
    lab.start_daemon("sresctld")
    wait_for(lambda: texts(lab, "closed"), 120, Story(lab))
    assert all_idle(lab)
    assert len(texts(lab, "replacing")) == 1
    assert lab.status()["nodes"]["n2"]["boots"] == boots + 1
    assert not texts(lab, "replacement-failed")


def test_a_pause_and_a_person_count_between_two_acts(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    lab = fresh_lab(power_saving_lab())
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    ask(lab, "n2", REPLACE)
    wait_for(lambda: "POWERING_DOWN" in lab.node_states()["n2"], 60, "it is being powered down")
    lab.run([str(own_bin() / "sres"), "pause", "look first"], check=True)
    wait_for(lambda: "POWERED_DOWN" in lab.node_states()["n2"], 60, "it is powered down")
    words = ["scontrol", "update", "nodename=n2", "state=drain", "reason=RMA 4711"]
    lab.run(words, check=True)
    lab.run([str(own_bin() / "sres"), "unpause"], check=True)
    wait_for(lambda: "taken-over" in kinds(lab, "n2"), 30, "the person is heard")
    wait_for(lambda: health(lab, "n2") == "held", 30, "it is left alone")
    assert not texts(lab, "repairing")
    assert "POWERED_DOWN" in lab.node_states()["n2"]


def test_a_failed_power_up_is_told_from_one_that_was_never_done(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    spec = power_saving_lab()
    spec.options["ResumeTimeout"] = "5"
    lab = fresh_lab(spec)
    program = lab.directory / "bin" / "resume-node"
    works = program.read_text()
    program.write_text("#!/bin/sh\nexit 1\n")
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    ask(lab, "n2", REPLACE)
    wait_for(lambda: texts(lab, "replacement-failed"), 120, "the first try fails")
    assert "half done: it is powered down" in texts(lab, "replacement-failed")[0]
    program.write_text(works)
    wait_for(lambda: texts(lab, "closed"), 120, Story(lab))
    assert len(texts(lab, "replacing")) == 2
    assert all_idle(lab)


def test_a_sick_node_is_rebooted_by_slurm_and_then_left_to_a_person(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    options = {"recovery": {"max_reboots": 1}, "replace": {"program": []}}
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=options))
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    boots = lab.status()["nodes"]["n2"]["boots"]
    lab.run(["scontrol", "update", "nodename=n2", "comment=rack 7"], check=True)
    lab.kmsg("n2", XID)
    wait_for(lambda: texts(lab, "closed"), 120, Story(lab))
    assert lab.status()["nodes"]["n2"]["boots"] == boots + 1
    assert texts(lab, "replacing") == ["slurm-reboot reboot n2"]
    # Where scontrol was too slow at the incident's end, they are taken off some cycles later.
    wait_for(lambda: comment(lab) == "rack 7", 60, "its labels are taken off")
    assert "its labels are taken off" in texts(lab, "labelled")
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    lab.kmsg("n2", XID)
    said = "no replacement program is configured (replace.program): waiting for a person"
    wait_for(lambda: said in texts(lab, "alarm"), 60, "nothing here can replace it")
    assert len(texts(lab, "replacing")) == 1
    begin = "rack 7 [sres health-status=pending-replacement fault-type=xid"
    wait_for(lambda: comment(lab).startswith(begin), 60, "its labels are written")
    labelled = comment(lab)
    words = ["node", "list", "--health-status", "pending-replacement", "--fault-type", "xid"]
    assert [shown["node"] for shown in sres(lab, *words)] == ["n2"]
    assert [shown["node"] for shown in sres(lab, *words[:2], "--health-status", "schedulable")] == [
        "n1"
    ]
    lab.kill_daemon("slurmctld")
    lab.start_daemon("slurmctld")
    wait_for(lambda: comment(lab) == labelled, 90, "the labels outlive slurmctld")
    assert REBOOT not in lab.run(["scontrol", "show", "node", "n2", "-o"]).stdout


def test_a_node_that_a_person_reboots_by_slurm_is_not_replaced(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    """Slurm adds to our Reason; the node boots without its fault, and is given back."""
    replace = {"program": ["/bin/false"], "backoff": 600.0, "silent_for": 5.0}
    options = {"replace": replace, "recovery": {"max_reboots": 0}}
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=options))
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    lab.kmsg("n2", XID)
    wait_for(lambda: texts(lab, "replacement-failed"), 60, Story(lab))
    assert f"{REPLACE} " in lab.run(["scontrol", "show", "node", "n2", "-o"]).stdout
    lab.run(["scontrol", "reboot", "n2"], check=True)
    wait_for(lambda: texts(lab, "closed"), 120, Story(lab))
    assert len(texts(lab, "replacing")) == 1
    assert not {"asked-anew", "requested"} & set(kinds(lab, "n2"))
    assert texts(lab, "came-back") == ["its sresd beats, and nothing is found on it"]
    wait_for(lambda: all_idle(lab), 30, Story(lab))
