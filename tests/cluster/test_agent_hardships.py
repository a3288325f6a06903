"""Hardships of sresd on real nodes: heartbeats go on, nothing is lost, and no node is marked."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import all_idle, events

from slurm_resilience.errors import LabError
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
LINES, EVERY = 1500, 100
"""Lines of the storm, and one in so many of them is a finding."""
CHECK = """\
#!/bin/sh
[ "$(hostname)" = n1 ] && kill -STOP $$
exit 0
"""


def shown(lab: Lab, node: str) -> dict[str, Any]:
    done = lab.run([str(own_bin() / "sres"), "node", "show", node, "--format", "json"])
    return dict(json.loads(done.stdout)[0]) if done.returncode == 0 else {}


def beats(lab: Lab, node: str) -> bool:
    """sresctld has heard the node's sresd just now."""
    view = shown(lab, node)
    return bool(view) and view["health"] == "healthy" and view["sresd"].startswith("connected")


def fabric(root: Path, state: str, physical: str) -> Path:
    """Lay out one InfiniBand port."""
    port = root / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "phys_state").write_text(f"{physical}\n")
    return root


def storm(lab: Lab, node: str, wait_for: WaitFor) -> set[str]:
    """Write lines as fast as they are read; return the parts that findings must name."""

    def write(line: str) -> bool:
        try:
            lab.kmsg(node, line)
        except LabError:
            return False
        return True

    parts = set()
    for number in range(LINES):
        line = f"usb 1-{number}: new high-speed USB device number {number} using xhci_hcd"
        if number % EVERY == 0:
            part = f"0000:{number // EVERY:02x}:00"
            parts.add(part)
            line = f"NVRM: Xid (PCI:{part}): 63, Row Remapper: New row marked for remapping"
        wait_for(lambda line=line: write(line), 30, "the log is read")
    return parts


def test_nothing_that_happens_to_sresd_marks_a_node_or_is_lost(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    checks = tmp_path / "checks"
    checks.mkdir()
    (checks / "stops").write_text(CHECK)
    (checks / "stops").chmod(0o755)
    root = tmp_path / "root"
    (root / "sys" / "class").mkdir(parents=True)
    (root / "proc").symlink_to("/proc")
    fabric(root / "sys" / "class" / "infiniband", "4: ACTIVE", "5: LinkUp")
    agent = {
        "check_interval": 1.0,
        "health_log": "/run/sres-node/log/health.jsonl",
        "sysroot": str(root),
    }
    options = {"agent": agent, "checks": {"directory": str(checks)}}
    lab = fresh_lab(LabSpec(nodes=4, network=True, sres_options=options))
    wait_for(lambda: all_idle(lab), 60, "every node is idle")
    for node in lab.nodes:
        wait_for(lambda n=node: beats(lab, n), 30, f"{node} beats")

    # n3: no byte is left on the disk that sresd writes its log to.
    fill = (
        "mkdir -p /run/sres-node/log && mount -t tmpfs -o size=16k,mode=755 none /run/sres-node/log"
    )
    fill += "; dd if=/dev/zero of=/run/sres-node/log/full bs=1k count=64 2>/dev/null; true"
    lab.run(["bash", "-c", fill], node="n3", check=True)
    # n2: sresd is killed, and slurmd is not.
    lab.kill_daemon("sresd", signal.SIGKILL, "n2")
    # All: sresctld is away, and n4's kernel has much to say meanwhile.
    lab.kill_daemon("sresctld", signal.SIGKILL)
    parts = storm(lab, "n4", wait_for)
    lab.kmsg("n3", "NVRM: Xid (PCI:0000:07:00): 63, Row Remapper: New row marked for remapping")
    lab.start_daemon("sresctld")
    lab.start_daemon("sresd", "n2")

    def told(node: str) -> set[str]:
        findings = shown(lab, node).get("findings", ())
        return {one["subject"] for one in findings if one["check"] != "injected"}

    wait_for(lambda: told("n4") >= parts, 60, "every finding is there")
    wait_for(lambda: told("n3") == {"0000:07:00"}, 30, "a full disk holds nothing up")
    for node in lab.nodes:
        wait_for(lambda n=node: beats(lab, n), 60, f"{node} beats")
    # n1's own check was stopped in its first second, and has a minute. The others go on.
    assert "T" in lab.run(["ps", "-o", "stat=", "-C", "stops"], node="n1").stdout
    # A changed tree is read as any is. Only what the fault is about is said to be injected.
    inject = [str(own_bin() / "sres"), "inject", "n1", "ib-port-down"]
    lab.run(inject, check=True)
    wait_for(lambda: told("n1") == {"mlx5_0/1"}, 30, "another check has looked")
    (found,) = (one for one in shown(lab, "n1")["findings"] if one["check"] == "infiniband_ports")
    assert found["injected"] and found["text"].endswith("(injected)")
    assert told("n2") == set()
    lab.run([*inject, "--undo"], check=True)
    wait_for(lambda: told("n1") == set(), 30, "the port is up again")
    assert lab.run([*inject, "--undo"]).returncode == 2
    assert beats(lab, "n1")
    marks = ("detected", "marked", "replacing")
    assert not [event for event in events(lab) if event["kind"] in marks]
    assert all_idle(lab)
