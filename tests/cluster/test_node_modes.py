"""`recovery.mode` on real Slurm: what is observed is written down, and left alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
ACTS = {"marking", "marked", "detected", "requested", "replacing", "resuming", "taken-out"}


def sres(lab: Lab, *words: str) -> Any:
    done = lab.run([str(own_bin() / "sres"), *words, "--format", "json"])
    return json.loads(done.stdout) if done.stdout else {}


def reason(lab: Lab, node: str) -> str:
    shown = lab.run(["scontrol", "show", "node", node, "-o"], check=True).stdout
    return shown.partition(" Reason=")[2]


def test_an_observed_node_is_not_touched_and_reviewed(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """A site begins so: the journal says what would be done, and people do what they always did."""
    called = tmp_path / "called"
    program = tmp_path / "replace"
    program.write_text(f"#!/bin/sh\necho $* >> {called}\n")
    program.chmod(0o755)
    lab = fresh_lab(
        LabSpec(
            nodes=3,
            network=True,
            sres_options={
                "recovery": {"mode": "observe"},
                "replace": {"program": [str(program)], "silent_for": 8.0},
            },
        )
    )
    wait_for(lambda: all_idle(lab), 30, "every node is idle")
    wait_for(lambda: sres(lab, "node", "list", "n2")[0]["health"] == "healthy", 30, "n2 beats")
    assert sres(lab, "node", "list", "n2")[0]["mode"] == "observe"
    lab.power_off("n2")
    wait_for(lambda: "would-replace" in kinds(lab, "n2"), 60, "it would be replaced")
    assert "Action:" not in reason(lab, "n2")
    (fault,) = sres(lab, "review")
    assert (fault["node"], fault["kind"], fault["agrees"]) == ("n2", "dead", None)
    # A person looks at it, and has the machine changed.
    lab.run(["scontrol", "update", "nodename=n2", "state=drain", "reason=PSU"], check=True)
    wait_for(lambda: "seen-set-aside" in kinds(lab, "n2"), 30, "the drain is written down")
    lab.replace("n2")
    lab.run(["scontrol", "update", "nodename=n2", "state=resume"], check=True)
    wait_for(lambda: sres(lab, "review")[0]["agrees"] is not None, 60, "the fault is over")
    (fault,) = sres(lab, "review")
    assert (fault["outcome"], fault["agrees"]) == ("replaced", True)
    shown = lab.run([str(own_bin() / "sres"), "review"]).stdout
    assert "replace it after" in shown and "PSU" in shown
    assert not called.exists()
    assert not ACTS & {event["kind"] for event in events(lab)}


def test_a_wrong_mode_is_one_line_and_no_daemon(
    shared_lab: Callable[[LabSpec], Lab], tmp_path: Path
) -> None:
    lab = shared_lab(LabSpec(nodes=1))
    known = (lab.directory / "etc" / "sres.toml").read_text()
    wrong = {
        "recovery.mode: 'observed' is no mode": known.replace(
            "[recovery]", '[recovery]\nmode = "observed"'
        ),
        "Slurm has no node 'n2'": f'{known}\n[recovery.nodes]\nn2 = "none"\n',
        "Slurm has no partition 'x'": f'{known}\n[recovery.partitions]\nx = "none"\n',
    }
    for says, text in wrong.items():
        config = tmp_path / "sres.toml"
        config.write_text(re.sub("state_dir = .*", f'state_dir = "{tmp_path}/state"', text))
        line = [str(own_bin() / "sresctld"), "--config", str(config), "--once", "--dry-run"]
        done = lab.run(line)
        assert done.returncode != 0
        assert says in done.stderr and len(done.stderr.splitlines()) == 1
