"""Two controllers: slurmctld's primary and backup, and a sresctld beside each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience.lab import Lab, LabSpec

LabFactory = Callable[[LabSpec], Lab]
WaitFor = Callable[..., Any]

SPEC = LabSpec(
    nodes=2,
    network=True,
    backup=True,
    plugin=None,
    lifecycle=None,
    options={"SlurmctldTimeout": "4"},
    sres_options={"replace": {"silent_for": 1.0}},
)


def _status(lab: Lab, machine: str) -> dict[str, Any]:
    done = lab.run(["sres", "status", "--format", "json"], node=machine, timeout=60)
    try:
        picture: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"error": done.stderr}
    return picture


def _standby(lab: Lab, machine: str) -> tuple[str, str, bool]:
    """The active machine, its standby, and whether that has the whole journal."""
    found = _status(lab, machine).get("controller", {}).get("standby") or {}
    return found.get("active", ""), found.get("standby", ""), found.get("has_journal", False)


def _events(lab: Lab, machine: str) -> list[tuple[str, str]]:
    argv = ["sres", "events", "--format", "json"]
    done = lab.run(argv, node=machine, timeout=60, check=True)
    return [(event["kind"], event["text"]) for event in json.loads(done.stdout)]


def test_the_standby_goes_on_with_a_replacement(
    fresh_lab: LabFactory, wait_for: WaitFor[object]
) -> None:
    lab = fresh_lab(SPEC)
    wait_for(lambda: _standby(lab, "ctl") == ("ctl", "ctl2", True), 30, "ctl2 has the journal")
    first = lab.instance("n2")
    calls = _note_calls(lab)
    lab.run(
        ["scontrol", "update", "nodename=n2", "state=fail", "reason=Action:Replace"], check=True
    )
    wait_for(lambda: lab.status()["nodes"]["n2"]["state"] != "joined", 30, "n2 goes down")
    lab.power_off("ctl")

    wait_for(lambda: _standby(lab, "ctl2")[0] == "ctl2", 60, "ctl2 is active")
    wait_for(lambda: _state(lab, "n2") == "IDLE", 60, "n2 is back")
    assert lab.instance("n2") != first
    assert calls.read_text().splitlines() == ["replace n2"]
    events = _events(lab, "ctl2")
    kinds = [kind for kind, _ in events]
    assert kinds.count("replacing") == kinds.count("replaced") == kinds.count("closed") == 1
    (_, text) = next(event for event in reversed(events) if event[0] == "takeover")
    assert "ctl began nothing of which there is no record here" in text

    # The primary comes back: its slurmctld takes control, and its sresctld the newer journal.
    lab.power_on("ctl")
    lab.start_daemon("slurmctld", "ctl")
    lab.start_daemon("sresctld", "ctl")
    wait_for(lambda: _standby(lab, "ctl") == ("ctl", "ctl2", True), 60, "ctl is active again")
    events = _events(lab, "ctl")
    assert [kind for kind, _ in events].count("closed") == 1
    assert "ctl2 has handed its journal over" in str(events)


def _takeover_by_a_standby_that_was_away(lab: Lab, wait_for: WaitFor[object]) -> None:
    wait_for(lambda: _standby(lab, "ctl") == ("ctl", "ctl2", True), 30, "ctl2 has the journal")
    lab.cut("ctl2")
    wait_for(lambda: not _standby(lab, "ctl")[2], 30, "ctl is alone")
    # Without the network between them ctl2's slurmctld stays in standby: the heartbeat is fresh.
    calls = _note_calls(lab)
    lab.run(["scontrol", "update", "nodename=n2", "state=fail", "reason=Action:Replace"])
    wait_for(calls.exists, 30, "ctl goes on alone")
    lab.power_off("ctl")
    lab.mend("ctl2")
    wait_for(lambda: _standby(lab, "ctl2")[0] == "ctl2", 90, "ctl2 is active")
    text = str(_events(lab, "ctl2"))
    assert "ctl was active without this standby at its end" in text
    assert "left to a person: n2" in text
    assert calls.read_text().splitlines() == ["replace n2"]


if os.environ.get("SRES_TEST_STANDBY"):

    def test_a_standby_that_was_away_begins_nothing_that_may_have_been_begun(
        fresh_lab: LabFactory, wait_for: WaitFor[object]
    ) -> None:
        _takeover_by_a_standby_that_was_away(fresh_lab(SPEC), wait_for)


def _note_calls(lab: Lab) -> Path:
    """Have the replacement program write down each of its calls."""
    program, calls = lab.directory / "bin" / "replace-node", lab.directory / "calls"
    program.write_text(program.read_text().replace("exec ", f'echo "$@" >>{calls}\nexec ', 1))
    return calls


def _state(lab: Lab, node: str) -> str:
    fields = lab.run(["scontrol", "show", "node", node, "-o"], node="ctl2", timeout=60).stdout
    return next((word[6:] for word in fields.split() if word.startswith("State=")), fields)
