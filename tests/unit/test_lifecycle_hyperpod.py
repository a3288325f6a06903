"""HyperPod's ``on_create.sh`` and ``provisioning_parameters.json``, accepted as they are."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.errors import UsageError
from slurm_resilience.lifecycle import hyperpod
from slurm_resilience.lifecycle.hyperpod import (
    VARIABLE,
    environment,
    parse_parameters,
    resource_config,
)
from slurm_resilience.lifecycle.main import RunPlan, run
from slurm_resilience.lifecycle.run_record import LifecycleError
from slurm_resilience.lifecycle.script_set import scripts_of
from slurm_resilience.model import Node

DOCUMENTED: dict[str, Any] = {
    "version": "1.0.0",
    "workload_manager": "slurm",
    "controller_group": "controller-machine",
    "login_group": "login-group",
    "worker_groups": [
        {"instance_group_name": "worker-group-1", "partition_name": "partition-1"},
        {"instance_group_name": "worker-group-2", "partition_name": "partition-2"},
    ],
    "fsx_dns_name": "fs-0123.fsx.us-west-2.amazonaws.com",
    "fsx_mountname": "abcdef01",
}
# As the published script begins: it finds its files beside itself, and the cluster by a variable.
ON_CREATE = """#!/bin/bash
set -e
[ -f provisioning_parameters.json ]
[ -f lifecycle_script.py ]
grep -c worker-group-1 "$SAGEMAKER_RESOURCE_CONFIG_PATH"
echo "arguments: $#" >> ../ran
"""


def test_the_documented_form_is_read() -> None:
    read = parse_parameters(json.dumps(DOCUMENTED), "p.json")
    assert read.controller_group == "controller-machine"
    assert [tuple(group) for group in read.worker_groups] == [
        ("worker-group-1", "partition-1"),
        ("worker-group-2", "partition-2"),
    ]
    newer = DOCUMENTED | {"fsx_openzfs_dns_name": "fs-9", "anything": [1]}
    assert parse_parameters(json.dumps(newer), "p.json") == read


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 1}, "'version' must be a text"),
        ({"workload_manager": "eks"}, "workload_manager is 'eks'; only 'slurm'"),
        ({"controller_group": ""}, "'controller_group' must be a text"),
        ({"login_group": 7}, "'login_group' must be a text"),
        ({"worker_groups": {}}, "'worker_groups' must be a list"),
        ({"worker_groups": [{"partition_name": "p"}]}, "needs an instance_group_name and a"),
        ({"worker_groups": ["w"]}, "needs an instance_group_name and a"),
    ],
)
def test_each_mistake_is_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"^p.json: .*{says}"):
        parse_parameters(json.dumps(DOCUMENTED | change), "p.json")


@pytest.mark.parametrize(("text", "says"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_what_is_no_object_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"^p.json: {says}"):
        parse_parameters(text, "p.json")


def test_the_clusters_description_has_each_group() -> None:
    nodes = [
        Node("n1", "IDLE", address="192.0.2.1", partitions=("partition-1", "all")),
        Node("n2", "IDLE", address="192.0.2.2", partitions=("partition-2",)),
        Node("n3", "IDLE", address="192.0.2.3", partitions=("other",)),
    ]
    parameters = parse_parameters(json.dumps(DOCUMENTED), "")
    made = resource_config(parameters, "c1", ["192.0.2.9"], nodes, {"n1": "i-1"})
    assert made["ClusterConfig"]["ClusterName"] == "c1"
    groups = {group["Name"]: group["Instances"] for group in made["InstanceGroups"]}
    addresses = {
        name: [(one["CustomerIpAddress"], one["InstanceId"]) for one in instances]
        for name, instances in groups.items()
    }
    assert addresses == {
        "controller-machine": [("192.0.2.9", "")],
        "worker-group-1": [("192.0.2.1", "i-1")],
        "worker-group-2": [("192.0.2.2", "")],
    }


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    monkeypatch.delenv(VARIABLE, raising=False)
    directory = tmp_path / "scripts"
    directory.mkdir()
    # Without its execute bit, as it comes from an object store.
    (directory / "on_create.sh").write_text(ON_CREATE)
    (directory / "lifecycle_script.py").write_text("pass\n")
    (directory / "provisioning_parameters.json").write_text(json.dumps(DOCUMENTED))
    return RunPlan(
        directory, tmp_path / "state", tmp_path / "log", "n1", boot_id="b1", instance="i1"
    )


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm([Node("n1", "DOWN", address="192.0.2.1", partitions=("partition-1",))])
    monkeypatch.setattr(hyperpod, "_client", lambda: fake)
    return fake


def ran(plan: RunPlan) -> int:
    return len((plan.directory.parent / "ran").read_text().splitlines())


def test_it_runs_as_it_is_once_for_each_disk(plan: RunPlan, slurm: FakeSlurm) -> None:
    first = run(plan)
    assert [(result.name, result.rc) for result in first.results] == [("on_create.sh", 0)]
    assert (plan.directory.parent / "ran").read_text() == "arguments: 0\n"
    run(replace(plan, boot_id="b2"))
    assert ran(plan) == 1
    run(replace(plan, boot_id="b2", again=True))
    assert ran(plan) == 2
    # A file beside it has changed: it is another script now.
    (plan.directory / "lifecycle_script.py").write_text("print()\n")
    run(replace(plan, boot_id="b2"))
    assert ran(plan) == 3


def test_numbered_scripts_run_behind_it(plan: RunPlan, slurm: FakeSlurm) -> None:
    script = plan.directory / "10-a"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert [found.name for found in scripts_of(plan.directory)] == ["on_create.sh", "10-a"]
    run(plan)
    script.write_text("#!/bin/sh\n# changed\n")
    run(replace(plan, boot_id="b2"))
    assert ran(plan) == 1


def test_a_site_that_has_the_clusters_description_keeps_it(plan: RunPlan) -> None:
    own = plan.directory.parent / "own.json"
    own.write_text('{"InstanceGroups": [{"Name": "worker-group-1"}]}')
    folders = (plan.directory, plan.state_dir, "n1")
    assert environment(*folders, str(own))[VARIABLE] == str(own)
    run(replace(plan, resource_config=str(own)))
    assert not (plan.state_dir / "resource_config.json").exists()


def test_without_parameters_it_is_a_script_like_any_other(plan: RunPlan) -> None:
    (plan.directory / "provisioning_parameters.json").unlink()
    assert environment(plan.directory, plan.state_dir, "n1", "") == os.environ


def test_what_stands_in_its_way_is_the_scripts_failure(plan: RunPlan, slurm: FakeSlurm) -> None:
    with pytest.raises(LifecycleError, match=r"^on_create.sh failed .*: .*has a partition of n9"):
        run(replace(plan, node="n9"))
    slurm.unreachable = True
    with pytest.raises(LifecycleError, match=r"resource_config.json could not be made: "):
        run(plan)
    assert not (plan.directory.parent / "ran").exists()
