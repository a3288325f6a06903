"""HyperPod's form of lifecycle scripts: ``on_create.sh`` with ``provisioning_parameters.json``.

The scripts find the cluster in a second file, which HyperPod writes, and whose path stands in
``SAGEMAKER_RESOURCE_CONFIG_PATH``. Where there is none, it is made here from what Slurm says.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.lifecycle import identity
from slurm_resilience.model import Node
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import SlurmClient

PARAMETERS = "provisioning_parameters.json"
VARIABLE = "SAGEMAKER_RESOURCE_CONFIG_PATH"
RESOURCE_CONFIG = "resource_config.json"
ASK_SECONDS = 20.0


class WorkerGroup(NamedTuple):
    """A group of machines, and the partition that their nodes are in."""

    instance_group_name: str
    partition_name: str


class ProvisioningParameters(NamedTuple):
    """The part of ``provisioning_parameters.json`` that says which machine is what."""

    controller_group: str
    worker_groups: tuple[WorkerGroup, ...]


def parse_parameters(text: str, where: str) -> ProvisioningParameters:
    """Read ``provisioning_parameters.json``; keys that its scripts alone know are left to them.

    Raises:
        UsageError: it is not of that form.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{where}: not a JSON object")
    for key in ("version", "workload_manager", "controller_group"):
        if not isinstance(data.get(key), str) or not data[key]:
            raise UsageError(f"{where}: '{key}' must be a text")
    for key in ("login_group", "fsx_dns_name", "fsx_mountname"):
        if not isinstance(data.get(key, ""), str):
            raise UsageError(f"{where}: '{key}' must be a text")
    if data["workload_manager"] != "slurm":
        manager = data["workload_manager"]
        raise UsageError(f"{where}: workload_manager is '{manager}'; only 'slurm' is known here")
    groups = data.get("worker_groups", [])
    if not isinstance(groups, list):
        raise UsageError(f"{where}: 'worker_groups' must be a list")
    return ProvisioningParameters(
        data["controller_group"], tuple(_group(group, where) for group in groups)
    )


def _group(data: Any, where: str) -> WorkerGroup:
    names = [data.get(key) for key in WorkerGroup._fields] if isinstance(data, dict) else [None]
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"{where}: each of 'worker_groups' needs an instance_group_name and a partition_name"
        )
    return WorkerGroup(*names)


def resource_config(
    parameters: ProvisioningParameters,
    cluster: str,
    controllers: Sequence[str],
    nodes: Iterable[Node],
    instances: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of ``resource_config.json``.

    Args:
        parameters: which group is what.
        cluster: its name.
        controllers: addresses of slurmctld, primary first.
        nodes: all nodes of Slurm.
        instances: the machine's identity, by node, as far as it is known here.
    """
    listed = list(nodes)
    controller = [
        _instance(f"{parameters.controller_group}-{number}", address, "")
        for number, address in enumerate(controllers, 1)
    ]
    groups = [_instance_group(parameters.controller_group, controller)]
    for group in parameters.worker_groups:
        members = [node for node in listed if group.partition_name in node.partitions]
        groups.append(
            _instance_group(
                group.instance_group_name,
                [
                    _instance(node.name, node.address or node.name, instances.get(node.name, ""))
                    for node in members
                ],
            )
        )
    return {
        "ClusterConfig": {"ClusterArn": "", "ClusterName": cluster},
        "InstanceGroups": groups,
    }


def _instance_group(name: str, instances: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    return {"Name": name, "InstanceType": "", "Instances": list(instances)}


def _instance(name: str, address: str, identity_of_machine: str) -> dict[str, str]:
    return {
        "InstanceName": name,
        "AgentIpAddress": address,
        "CustomerIpAddress": address,
        "InstanceId": identity_of_machine,
    }


def environment(
    directory: Path,
    state_dir: Path,
    node: str,
    given: str,
    client: SlurmClient | None = None,
) -> Mapping[str, str]:
    """Return the environment of ``on_create.sh``.

    Args:
        directory: its own.
        state_dir: where the description of the cluster is written, if it has to be made.
        node: the node's name in Slurm.
        given: the site's own description of the cluster; one that is not there is made.
        client: Slurm; None: its commands, as they are configured.

    Raises:
        UsageError: ``provisioning_parameters.json`` is not of its form, or names no group of this
            node.
        SlurmError: the description has to be made, and Slurm does not answer.
    """
    parameters_file = directory / PARAMETERS
    if not parameters_file.exists():
        return os.environ
    parameters = parse_parameters(parameters_file.read_text("utf-8"), str(parameters_file))
    named = [os.environ.get(VARIABLE, ""), given]
    path = next((name for name in named if name and Path(name).is_file()), "")
    if not path:
        path = str(_write_config(parameters, state_dir, node, client or _client()))
    return {**os.environ, VARIABLE: path}


def _client() -> SlurmClient:
    from slurm_resilience import config

    return CliClient(config.load().slurm_bin, timeout=ASK_SECONDS)


def _write_config(
    parameters: ProvisioningParameters, state_dir: Path, node: str, client: SlurmClient
) -> Path:
    try:
        info, nodes = client.info(), client.nodes()
    except SresError as error:
        raise type(error)(f"{RESOURCE_CONFIG} could not be made: {error}") from None
    of_groups = {group.partition_name for group in parameters.worker_groups}
    own = next((one for one in nodes if one.name == node), None)
    if own is None or of_groups.isdisjoint(own.partitions):
        raise UsageError(
            f"{PARAMETERS}: no group of worker_groups has a partition of {node}; name one"
        )
    content = resource_config(
        parameters,
        info.cluster,
        [_number(address) for address in info.controllers],
        [_with_number(one) if one is own else one for one in nodes],
        {node: identity.instance()},
    )
    path = state_dir / RESOURCE_CONFIG
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _with_number(node: Node) -> Node:
    from msgspec.structs import replace

    return replace(node, address=_number(node.address or node.name))


def _number(address: str) -> str:
    """Return an address as a number: the scripts compare it with the machine's own."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address
