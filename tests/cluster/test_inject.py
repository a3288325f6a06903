"""A drill on real Slurm: an injected line is found, marked, repaired, and marked as injected."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jobs import all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
AGENT = {"accept_injected": False}
SRES = str(own_bin() / "sres")


def findings(lab: Lab, node: str) -> list[dict[str, Any]]:
    done = lab.run([SRES, "node", "show", node, "--format", "json"])
    return list(json.loads(done.stdout)[0]["findings"]) if done.stdout else []


def health(lab: Lab, node: str) -> str:
    done = lab.run([SRES, "node", "list", node, "--format", "json"])
    return str(json.loads(done.stdout)[0]["health"]) if done.stdout else ""


def drills(lab: Lab, nodes: str) -> list[float]:
    """The seconds that each node's drill still lasts; nothing while one does not answer."""
    done = lab.run([SRES, "drill", "status", nodes, "--format", "json"])
    is_told = done.returncode == 0
    return [one["seconds_left"] for one in json.loads(done.stdout)] if is_told else []


def test_an_injected_fault_goes_the_whole_way_and_is_marked_everywhere(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    # As on a real node: lines of programs count during a drill alone.
    lab = fresh_lab(LabSpec(nodes=3, network=True, sres_options={"agent": AGENT}))
    wait_for(lambda: all_idle(lab), 60, "every node is idle")
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")

    lab.run([SRES, "inject", "n2", "xid79"], check=True)
    (told,) = wait_for(lambda: findings(lab, "n2"), 30, "the line is told")
    assert (told["severity"], told["injected"]) == ("monitor", True)
    assert kinds(lab, "n2") == []

    opened = lab.run([SRES, "drill", "open", "n2"], check=True).stdout
    assert opened.startswith("n2: a drill is open for ")
    # It is kept on the node: sresd may be started anew meanwhile.
    lab.kill_daemon("sresd", node="n2")
    lab.start_daemon("sresd", "n2")
    left = wait_for(lambda: drills(lab, "n[2-3]"), 30, "n2 answers again")
    assert [seconds > 0 for seconds in left] == [True, False]

    refused = lab.run([SRES, "inject", "n2", "xid79"], user="alice")
    assert (refused.returncode, refused.stdout) == (6, "")
    lab.run([SRES, "inject", "n2", "xid79"], check=True)
    wait_for(lambda: "closed" in kinds(lab, "n2"), 120, "it was rebooted and is back")
    (detected,) = [e for e in events(lab) if e["node"] == "n2" and e["kind"] == "detected"]
    assert detected["text"].endswith("(injected)")
    shown = lab.run([SRES, "incident", "list", "n2", "--format", "json"], check=True).stdout
    (incident,) = json.loads(shown)
    assert (incident["kind"], incident["action"]) == ("sick", "Action:Reboot")
    assert incident["reason"].endswith("(injected)")
    # The boot has ended the drill.
    assert wait_for(lambda: drills(lab, "n2"), 30, "n2 answers") == [0]

    # Of a crash only the line before it tells.
    lab.run([SRES, "drill", "open", "n3", "--minutes", "1"], check=True)
    lab.run([SRES, "inject", "n3", "node-crash"], check=True)
    wait_for(lambda: "closed" in kinds(lab, "n3"), 120, "it was replaced and is back")
    (detected,) = [e for e in events(lab) if e["node"] == "n3" and e["kind"] == "detected"]
    assert detected["text"].endswith("(injected)")
    wait_for(lambda: all_idle(lab), 30, "every node is idle again")
