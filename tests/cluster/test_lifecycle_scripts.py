"""Lifecycle scripts on real Slurm: a node that was replaced runs them, and joins only if they end
well; a person mends what is wrong, has them run again, and it joins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
SRES = str(own_bin() / "sres")


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def view(lab: Lab, node: str) -> dict[str, Any]:
    done = lab.run([SRES, "node", "list", node, "--format", "json"])
    return dict(json.loads(done.stdout)[0]) if done.stdout else {}


def of_kind(lab: Lab, kind: str) -> list[str]:
    return [event["text"] for event in events(lab) if event["kind"] == kind]


def lifecycle_of(lab: Lab, node: str) -> str:
    found = [one["text"] for one in view(lab, node)["findings"] if one["check"] == "lifecycle"]
    return str(found[0]) if found else ""


def ran(lab: Lab, node: str) -> list[str]:
    """The scripts that have run on this node's present disk, in their order."""
    return lab.run(["cat", "/run/sres-node/ran"], node=node).stdout.split()


def test_a_replaced_node_runs_its_scripts_and_one_whose_script_fails_stays_out(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    scripts, mended = tmp_path / "scripts", tmp_path / "mended"
    scripts.mkdir()
    mended.touch()
    script(scripts, "10-first", "echo 10-first >> /run/sres-node/ran")
    fit = f'echo 50-fit >> /run/sres-node/ran; [ -e {mended} ] || {{ echo "no licence"; exit 3; }}'
    script(scripts, "50-fit", fit)
    # The next try is far away: what brings the node back is the run that a person asks for.
    options = {"replace": {"backoff": 3600.0}, "agent": {"check_interval": 2.0}}
    lab = fresh_lab(LabSpec(nodes=2, lifecycle=scripts, sres_options=options))
    assert ran(lab, "n2") == ["10-first", "50-fit"]

    # A node that was replaced runs them on its new disk, and joins.
    old = lab.instance("n2")
    lab.run([SRES, "node", "replace", "n2"], check=True)
    wait_for(lambda: len(of_kind(lab, "closed")) == 1, 90, "n2 is replaced")
    assert lab.instance("n2") != old and ran(lab, "n2") == ["10-first", "50-fit"]
    wait_for(lambda: all_idle(lab), 60, "every node is idle")

    # One whose script fails never joins, and its Comment and its findings name the script.
    mended.unlink()
    lab.run(["scontrol", "update", "nodename=n2", "comment=RMA 4711"], check=True)
    lab.run([SRES, "node", "replace", "n2"], check=True)
    wait_for(lambda: of_kind(lab, "replacement-failed"), 90, "the new node does not join")
    wait_for(lambda: view(lab, "n2")["labels"].get("fault-type") == "lifecycle", 60, "the label")
    shown = view(lab, "n2")
    assert shown["labels"]["health-status"] == "pending-replacement"
    assert shown["labels"]["fault-reason"] == "50-fit failed (exit code 3): no licence"
    assert shown["comment"].startswith("RMA 4711 [sres ")
    failed = "50-fit failed (exit code 3): no licence"
    wait_for(lambda: lifecycle_of(lab, "n2") == failed, 60, "its finding")
    assert "slurmd" not in lab.status()["nodes"]["n2"]["daemons"]
    assert "FAIL" in shown["state"] and shown["reason"] == "Action:Replace"
    listed = lab.run([SRES, "node", "list", "--fault-type", "lifecycle", "--format", "json"])
    assert [one["node"] for one in json.loads(listed.stdout)] == ["n2"]

    # A run that fails again changes nothing; a node in service is refused.
    done = lab.run([SRES, "lifecycle", "run", "n2"])
    assert done.returncode == 1 and "n2: | no licence" in done.stdout
    refused = lab.run([SRES, "lifecycle", "run", "n1"])
    assert refused.returncode == 2 and "n1 is in service" in refused.stderr
    assert ran(lab, "n1") == ["10-first", "50-fit"]

    # Mended, and run again: it joins, and its labels are gone.
    mended.touch()
    done = lab.run([SRES, "lifecycle", "run", "n2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "n2: 2 scripts ran well" in done.stdout
    wait_for(lambda: all_idle(lab), 60, "n2 is back")
    wait_for(lambda: view(lab, "n2")["comment"] == "RMA 4711", 30, "its labels are off")
    assert lifecycle_of(lab, "n2") == ""
    done = lab.run(["srun", "-w", "n2", "hostname"])
    assert done.stdout.strip() == "n2"


PARAMETERS = {
    "version": "1.0.0",
    "workload_manager": "slurm",
    "controller_group": "controller-machine",
    "worker_groups": [{"instance_group_name": "worker-group-1", "partition_name": "main"}],
    "fsx_dns_name": "",
    "fsx_mountname": "",
}


def test_a_repaired_node_is_validated_and_hyperpods_script_knows_the_cluster(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    scripts, sound = tmp_path / "scripts", tmp_path / "sound"
    scripts.mkdir()
    (scripts / "provisioning_parameters.json").write_text(json.dumps(PARAMETERS))
    copy = 'cat provisioning_parameters.json "$SAGEMAKER_RESOURCE_CONFIG_PATH"'
    (scripts / "on_create.sh").write_text(f"#!/bin/bash\nset -e\n{copy} > /run/sres-node/seen\n")
    body = f"echo validated >> /run/sres-node/ran\n[ -e {sound} ] || {{ echo too slow; exit 1; }}"
    validate = script(tmp_path, "validate", body)
    options = {
        "recovery": {"validate": [str(validate)]},
        "replace": {"backoff": 15.0},
        "agent": {"check_interval": 2.0},
    }
    lab = fresh_lab(LabSpec(nodes=2, lifecycle=scripts, sres_options=options))
    address = lab.node_fields()["n2"]["NodeAddr"]
    seen = lab.run(["cat", "/run/sres-node/seen"], node="n2").stdout
    config = json.loads(seen[seen.index('{\n "ClusterConfig"') :])
    groups = {group["Name"]: group["Instances"] for group in config["InstanceGroups"]}
    assert [one["InstanceName"] for one in groups["worker-group-1"]] == ["n1", "n2"]
    assert groups["worker-group-1"][1]["CustomerIpAddress"] == address
    assert groups["worker-group-1"][1]["InstanceId"] == lab.instance("n2")
    # No node that joins by itself is validated: it may get a job at any moment.
    assert ran(lab, "n1") == ran(lab, "n2") == []

    # A new machine that fails its validation does not return; the next one passes.
    lab.run([SRES, "node", "replace", "n2"], check=True)
    wait_for(lambda: of_kind(lab, "replacement-failed"), 90, "the first one fails")
    text = "the node came back sick: validation: too slow"
    assert text in of_kind(lab, "replacement-failed")[0]
    wait_for(lambda: view(lab, "n2")["labels"].get("fault-type") == "validation", 30, "the label")
    sound.touch()
    wait_for(lambda: len(of_kind(lab, "closed")) == 1, 90, "the second one is given back")
    assert of_kind(lab, "resuming") == ["state=resume"] and ran(lab, "n2") == ["validated"]
    wait_for(lambda: all_idle(lab), 60, "every node is idle")


def test_a_validation_that_sresctld_alone_knows_of_costs_no_machine(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    options = {"replace": {"silent_for": 3600.0}, "agent": {"check_interval": 2.0}}
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=options))
    wait_for(lambda: view(lab, "n1").get("health") == "healthy", 30, "n1 beats")
    validate = script(tmp_path, "validate", "echo validated >> /run/sres-node/ran")
    config = lab.directory / "etc" / "sres.toml"
    known = config.read_text()
    setting = f'[recovery]\nvalidate = ["{validate}"]'
    config.write_text(known.replace("[recovery]", setting))
    lab.kill_daemon("sresctld")
    lab.start_daemon("sresctld")
    wait_for(lambda: view(lab, "n1").get("health") == "healthy", 30, "sresctld answers")
    config.write_text(known)

    # A node that was lost, and comes back by itself under the sresd of before, was not repaired.
    lab.cut("n1")
    wait_for(lambda: "marked" in kinds(lab, "n1"), 60, "n1 is lost")
    lab.mend("n1")
    wait_for(lambda: "closed" in kinds(lab, "n1"), 60, "n1 is given back")

    # A new machine, whose sresd does not know of it either, waits, and is not repaired again.
    lab.run([SRES, "node", "replace", "n2"], check=True)
    wait_for(lambda: "recovery.validate is set" in str(of_kind(lab, "alarm")), 90, "the alarm")
    config.write_text(known.replace("[recovery]", setting))
    lab.kill_daemon("sresd", node="n2")
    lab.start_daemon("sresd", "n2")
    wait_for(lambda: "closed" in kinds(lab, "n2"), 60, "n2 is validated, and given back")
    assert ran(lab, "n2") == ["validated"]
    assert kinds(lab, "n2").count("replacing") == 1
    wait_for(lambda: all_idle(lab), 60, "every node is idle")
