"""Slurm's own hooks on real slurmds: they ask the local sresd, and what they say counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle, events, kinds

from slurm_resilience.errors import MissingTool
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.releases import VERSIONS, root_of

WaitFor = Callable[..., Any]
HOOK = Path(__file__).resolve().parents[2] / "packaging" / "slurm-hook"
DIRECTORY = "/run/sres-node/sresd"
XID = "NVRM: Xid (PCI:0000:91:00): 79, pid=1, name=x, GPU has fallen off the bus."


def runs(lab: Lab, node: str) -> bool:
    done = lab.run(["srun", "-N1", "-n1", "-w", node, "--immediate=20", "true"])
    return done.returncode == 0


def state(lab: Lab, node: str) -> str:
    return lab.run(["cat", f"{DIRECTORY}/state"], node=node).stdout


def reason(lab: Lab, node: str) -> str:
    return lab.run(["sinfo", "-h", "-n", node, "-o", "%T %E"]).stdout


def test_prolog_epilog_and_health_check_ask_sresd(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    conf, hook = tmp_path / "hooks.conf", tmp_path / "slurm-hook"
    hook.write_text(HOOK.read_text().replace("/etc/slurm-resilience/hooks.conf", str(conf)))
    hook.chmod(0o755)
    conf.write_text(f"directory={DIRECTORY}\noldest=6\n")
    agent = {"hook_directory": DIRECTORY, "check_interval": 3600.0}
    options = {name: str(hook) for name in ("Prolog", "Epilog", "HealthCheckProgram")}
    spec = LabSpec(
        nodes=3,
        network=True,
        options=options | {"HealthCheckInterval": "2"},
        # sresctld would mark the node before a job comes to it.
        sres_options={"agent": agent, "recovery": {"mode": "observe"}},
    )
    lab = fresh_lab(spec)
    # slurmd has called the health check by now: it registers when that has ended.
    wait_for(lambda: all_idle(lab), 60, "every node is idle")
    wait_for(lambda: "verdict healthy" in state(lab, "n1"), 60, "n1 is healthy")
    assert runs(lab, "n1")
    asked = lab.run(["stat", "-c", "%Y", f"{DIRECTORY}/wanted"], node="n1")
    assert asked.returncode == 0, "the health check asks for checks"

    lab.kmsg("n2", XID)
    wait_for(lambda: "verdict reboot" in state(lab, "n2"), 30, "n2 has a fault")
    assert not runs(lab, "n2")
    wait_for(lambda: "Prolog error" in reason(lab, "n2"), 30, "Slurm keeps jobs away from n2")
    assert kinds(lab, "n2").count("marked") == 0, events(lab)

    # A sresd that hangs: its state grows old, and the site has chosen what follows.
    lab.run(["pkill", "-STOP", "-f", "bin/sres[d]"], node="n3", check=True)
    wait_for(lambda: asks(lab, hook, "n3", conf, "closed") == 1, 30, "its state is unknown")
    conf.write_text(f"directory={DIRECTORY}\noldest=6\n")
    assert runs(lab, "n3")
    lab.run(["pkill", "-CONT", "-f", "bin/sres[d]"], node="n3", check=True)
    wait_for(lambda: asks(lab, hook, "n3", conf, "closed") == 0, 30, "it writes again")


def asks(lab: Lab, hook: Path, node: str, conf: Path, unknown: str) -> int:
    conf.write_text(f"directory={DIRECTORY}\noldest=6\nunknown={unknown}\n")
    env = {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}
    return int(lab.run([str(hook)], node=node, env=env).returncode)


def test_the_newest_slurm_asks_when_slurmd_starts_and_no_more(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    try:
        root = root_of(VERSIONS[-1])
    except MissingTool as error:
        pytest.skip(f"needs a lab: {error}")
    conf, hook, asked = tmp_path / "hooks.conf", tmp_path / "slurm-hook", tmp_path / "asked"
    text = HOOK.read_text().replace("/etc/slurm-resilience/hooks.conf", str(conf))
    hook.write_text(text.replace("set -u\n", f"set -u\necho asked >>{asked}\n"))
    hook.chmod(0o755)
    conf.write_text(f"directory={tmp_path}\noldest=1000000\n")
    (tmp_path / "state").write_text("verdict healthy\ntext \nuptime 0\n")
    options = {"HealthCheckProgram": str(hook), "HealthCheckNodeState": "START_ONLY"}
    spec = LabSpec(
        nodes=1,
        daemons=False,
        plugin=None,
        lifecycle=None,
        slurm_root=root,
        options=options | {"HealthCheckInterval": "1"},
    )
    lab = fresh_lab(spec)
    wait_for(lambda: all_idle(lab), 60, "the node is idle")
    assert (tmp_path / "wanted").exists(), "it asks for checks"
    assert asked.read_text().count("asked") == 1

    (tmp_path / "state").write_text("verdict reboot\ntext Xid 79\nuptime 0\n")
    lab.kill_daemon("slurmd", node="n1")
    lab.start_daemon("slurmd", "n1")
    log = lab.directory / "nodes" / "n1" / "log" / "slurmd.log"
    said = "health_check failed: rc:1 output:sresd: reboot: Xid 79"
    wait_for(lambda: said in log.read_text(), 30, log.read_text)
    # Slurm has taken no notice of that since 17.02: the prolog and sresctld keep jobs away.
    wait_for(lambda: all_idle(lab), 30, "the node is idle again")
    assert asked.read_text().count("asked") == 2


def test_the_newest_slurm_asks_after_a_reboot_and_no_more(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    try:
        root = root_of(VERSIONS[-1])
    except MissingTool as error:
        pytest.skip(f"needs a lab: {error}")
    hook, asked = tmp_path / "slurm-hook", tmp_path / "asked"
    hook.write_text(HOOK.read_text().replace("set -u\n", f"set -u\necho asked >>{asked}\n"))
    hook.chmod(0o755)
    asked.touch()
    options = {"HealthCheckProgram": str(hook), "HealthCheckNodeState": "REBOOT_ONLY"}
    spec = LabSpec(
        nodes=1,
        network=True,
        daemons=False,
        plugin=None,
        lifecycle=None,
        slurm_root=root,
        options=options | {"HealthCheckInterval": "1"},
    )
    lab = fresh_lab(spec)
    wait_for(lambda: all_idle(lab), 60, "the node is idle")
    before = asked.read_text().count("asked")
    lab.kill_daemon("slurmd", node="n1")
    lab.start_daemon("slurmd", "n1")
    wait_for(lambda: all_idle(lab), 30, "the node is idle again")
    assert asked.read_text().count("asked") == before, "a start of slurmd is no reboot"

    boots = lab.status()["nodes"]["n1"]["boots"]
    lab.run(["scontrol", "reboot", "nextstate=resume", "n1"], check=True)
    wait_for(lambda: lab.status()["nodes"]["n1"]["boots"] > boots, 60, "n1 boots")
    wait_for(lambda: asked.read_text().count("asked") > before, 60, "slurmd asks after it")
    wait_for(lambda: all_idle(lab), 60, "the node is idle after its reboot")
