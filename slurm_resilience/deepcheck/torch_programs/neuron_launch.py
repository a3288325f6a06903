"""Start a rank on each Neuron core of this node, by torchrun, as AWS's own guides do.

The task of a step becomes torchrun, which tells each rank its core, and the ranks of all nodes of
each other. Every process stays below the task, and so within the step.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from slurm_resilience import config
from slurm_resilience.deepcheck.instance.neuron_collectives import neuron_cores
from slurm_resilience.deepcheck.step_requests import RankGroup
from slurm_resilience.deepcheck.torch_programs.rank_device import DeviceMissing
from slurm_resilience.errors import SresError
from slurm_resilience.health.check import CheckContext, Unjudged
from slurm_resilience.health.checks.accelerator import neuron_devices
from slurm_resilience.health.checks.network import efa_devices
from slurm_resilience.slurm.hostlists import expand

LAUNCHED = "TORCHELASTIC_RUN_ID"
"""torchrun sets it in every rank."""


def _this_node() -> CheckContext:
    try:
        return CheckContext(Path(config.load(None).agent.sysroot))
    except SresError as error:
        raise DeviceMissing(str(error)) from None


def has_neuron_devices() -> bool:
    """Return whether this node shows a Neuron device.

    Raises:
        DeviceMissing: its sres.toml cannot be read.
    """
    return bool(neuron_devices.probe(_this_node()))


def launch_words(
    group: RankGroup, node: str, cores: int, timeout_seconds: float, program: tuple[str, ...]
) -> list[str]:
    """Return torchrun's command line on one node of a group.

    Args:
        group: the nodes.
        node: this one.
        cores: ranks on this node; the nodes tell each other theirs.
        timeout_seconds: the other nodes are waited for so long.
        program: a module and its arguments.
    """
    nodes = expand(group.nodes)
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run"),
        *(f"--nnodes={len(nodes)}", f"--node-rank={nodes.index(node)}"),
        *(f"--nproc-per-node={cores}", f"--rdzv-conf=timeout={round(timeout_seconds)}"),
        *(f"--master-addr={group.address}", f"--master-port={group.port + 1}"),
        *("-m", *program),
    ]


def launch_environment(
    group: RankGroup, interface: str, has_efa: bool, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the ranks; what a site has set itself stays.

    Args:
        group: the nodes.
        interface: the one that leads to the others; empty: unknown.
        has_efa: the node has EFA devices.
        given: the environment of this process.
    """
    # The runtime's meeting place is an address; by default all groups would share one port.
    own = {"NEURON_RT_ROOT_COMM_ID": f"{group.address}:{group.port + 2}"}
    if interface:
        own["CCOM_SOCKET_IFNAME"] = interface
    if has_efa:
        own |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    # torchrun starts its ranks without -P, which would look for torch where root works.
    return {**own, **given, "PYTHONSAFEPATH": "1"}


def launch_on_cores(
    group: RankGroup, node: str, interface: str, timeout_seconds: float, program: tuple[str, ...]
) -> None:
    """Become torchrun. There is no return where it works; the arguments are `launch_words`'.

    Raises:
        DeviceMissing: with what is missing.
    """
    if not has_neuron_devices():
        raise DeviceMissing("the node shows no Neuron device, and its type has some")
    for module in ("torch", "torch_neuronx"):
        if find_spec(module) is None:
            raise DeviceMissing(f"{module} is not installed")
    try:
        cores = neuron_cores()
    except Unjudged as reason:
        raise DeviceMissing(str(reason)) from None
    has_efa = bool(efa_devices.probe(_this_node()).devices)
    try:
        group = RankGroup(group.nodes, socket.gethostbyname(group.address), group.port)
        words = launch_words(group, node, cores, timeout_seconds, program)
        os.execve(words[0], words, launch_environment(group, interface, has_efa, os.environ))
    except OSError as error:
        raise DeviceMissing(f"torchrun cannot be started: {error.strerror}") from None
