"""Evidence on real Slurm: what a node could still tell is kept before its machine is given away."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
BUG_REPORT = """\
#!/bin/sh
sleep 2
echo "$1" > "$3.gz"
"""
"""Not at once: the evidence is there before."""
XID = "NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus."


def health(lab: Lab, node: str) -> str:
    words = [str(own_bin() / "sres"), "node", "list", node, "--format", "json"]
    done = lab.run(words)
    return str(json.loads(done.stdout)[0]["health"]) if done.stdout else ""


def test_a_sick_node_tells_before_it_is_replaced_and_a_dead_one_is_not_waited_for(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    tool, shared = tmp_path / "nvidia-bug-report.sh", tmp_path / "shared"
    tool.write_text(BUG_REPORT)
    tool.chmod(0o755)
    shared.mkdir()
    options = {
        "agent": {"bug_report": str(tool)},
        "replace": {"evidence_directory": str(shared)},
    }
    lab = fresh_lab(LabSpec(nodes=3, network=True, sres_options=options))
    wait_for(lambda: all_idle(lab), 30, "every node is idle")
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    lab.kmsg("n2", XID)
    wait_for(lambda: "closed" in kinds(lab, "n2"), 120, "it is replaced and back")
    order = [kind for kind in kinds(lab, "n2") if kind in ("evidence", "replacing")]
    assert order == ["evidence", "evidence", "replacing"]
    told = [e for e in events(lab) if e["node"] == "n2" and e["kind"] == "evidence"]
    event = told[-1]
    (copied,) = shared.iterdir()
    assert event["text"].endswith(f"; copied to {copied}")
    assert copied.read_text() == "--safe-mode\n"
    folder = lab.directory / "ctl" / "sresctld" / "evidence" / str(event["incident"])
    assert event["text"].startswith("/") and str(folder) in event["text"]
    assert XID in (folder / "kernel.log").read_text()
    found = json.loads((folder / "findings.json").read_text())["findings"]
    assert [one["code"] for one in found] == ["79"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # Without power it has nothing to tell, and is replaced all the same.
    lab.power_off("n3")
    wait_for(lambda: "closed" in kinds(lab, "n3"), 120, "it is replaced and back")
    (event,) = [e for e in events(lab) if e["node"] == "n3" and e["kind"] == "evidence"]
    assert event["text"].startswith("none: ")
    wait_for(lambda: all_idle(lab), 30, "every node is idle again")
