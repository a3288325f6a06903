"""The reading side on real Slurm: what comes next, what happened, and one incident end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jobs import all_idle, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]


def sres(lab: Lab, *words: str) -> Any:
    done = lab.run([str(own_bin() / "sres"), *words, "--format", "json"])
    return json.loads(done.stdout) if done.stdout else {}


def test_the_queue_and_the_past_of_a_node(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    lab = fresh_lab(LabSpec(nodes=3, network=True, sres_options={"replace": {"silent_for": 600.0}}))
    wait_for(lambda: all_idle(lab), 30, "every node is idle")
    wait_for(lambda: sres(lab, "node", "list", "n2")[0]["health"] == "healthy", 30, "n2 beats")
    lab.power_off("n2")
    wait_for(lambda: "emptied" in kinds(lab, "n2"), 60, "it is marked and empty")

    def first() -> Any:
        return [act for act in sres(lab, "status")["queue"] if act["what"] == "replaced"]

    (act,) = wait_for(first, 30, "its replacement is announced")
    assert act["node"] == "n2" and act["at"] > 0 and act["unless"] == "it answers before"
    shown = lab.run([str(own_bin() / "sres"), "status"]).stdout
    assert "n2: replaced in" in shown and "unless it answers before" in shown
    (known,) = sres(lab, "incident", "list", "--open")
    assert (known["node"], known["state"]) == ("n2", "empty")
    lab.power_on("n2")
    wait_for(lambda: "closed" in kinds(lab, "n2"), 90, "it lives again and is given back")
    wait_for(lambda: sres(lab, "status")["queue"] == [], 30, "nothing comes next")
    assert sres(lab, "incident", "list", "--open") == []
    one = sres(lab, "incident", "show", str(known["id"]))
    assert one["ended_by"] == "closed"
    story = [event["kind"] for event in one["events"]]
    assert story[0] == "detected" and story[-1] == "closed"
    (event,) = sres(lab, "events", "n[1-3]", "--kind", "came-back", "--since", "10m")
    assert (event["node"], event["incident"]) == ("n2", known["id"])
    assert sres(lab, "events", "n1", "--kind", "came-back") == []
    assert [event["kind"] for event in sres(lab, "node", "history", "n2")][-1] == "closed"
    missing = lab.run([str(own_bin() / "sres"), "incident", "show", "999"])
    assert missing.returncode == 5 and "no incident 999" in missing.stderr
