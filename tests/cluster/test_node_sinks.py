"""Sinks of events on real Slurm: a whole replacement told, in order, over a restart, and to a sink
that was away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import all_idle, kinds

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_replacement_is_told_in_order_and_over_a_restart(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    file, away, late = tmp_path / "events", tmp_path / "away", tmp_path / "late"
    away.touch()
    pager = f"test ! -e {away} && cat >> {late}"
    sinks = {
        "sinks.log": {"file": str(file), "heartbeat": 1.0},
        "sinks.pager": {"command": ["/bin/sh", "-c", pager], "kinds": ["requested", "closed"]},
    }
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=sinks))
    wait_for(lambda: told(file), 30, "sresctld says that it lives")
    words = ["scontrol", "update", "nodename=n2", "state=fail", "reason=Action:Replace"]
    lab.run(words, check=True)
    wait_for(lambda: "replacing" in kinds(lab, "n2"), 60, "the program is started")
    lab.kill_daemon("sresctld")
    lab.start_daemon("sresctld")
    wait_for(lambda: "closed" in kinds(lab, "n2"), 90, "n2 is replaced")
    wait_for(lambda: all_idle(lab), 60, "every node is idle")

    def of_n2(path: Path) -> list[str]:
        by_id = {event["id"]: event["kind"] for event in told(path) if event["node"] == "n2"}
        return list(by_id.values())

    wait_for(lambda: of_n2(file)[-1:] == ["closed"], 30, "all of it was told")
    assert of_n2(file) == kinds(lab, "n2")
    assert not late.exists()
    away.unlink()
    wait_for(lambda: of_n2(late) == ["requested", "closed"], 90, "the pager hears it at last")
    before = len([event for event in told(file) if event["kind"] == "alive"])
    lab.kill_daemon("slurmctld")
    wait_for(
        lambda: "blind" in [e for e in told(file) if e["kind"] == "alive"][-1]["text"],
        60,
        "the sign of life says that Slurm cannot be read",
    )
    assert len([event for event in told(file) if event["kind"] == "alive"]) > before
