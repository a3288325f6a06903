"""The device of a rank and the backend that moves its data, chosen here alone.

NCCL on GPUs, torch-neuronx's backend on Neuron cores, gloo on processors. A Neuron core's backend
is torch_xla's (`xla`) where torch_xla is installed, else the native one (`neuron`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from slurm_resilience.deepcheck.step_requests import RankHardware

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

COMPILER = "--auto-cast=none"
"""Unasked, the compiler would turn float32 into bfloat16."""


class DeviceMissing(Exception):
    """Raised where a rank has no device, or not the library for it: says nothing of the node."""


class RankDevice(NamedTuple):
    """One device, and how its work is ended."""

    device: torch.device
    backend: str
    init_method: str = ""
    """The backend's own way to the other ranks; empty: our store."""
    step_done: Callable[[], object] = lambda: None
    """Called after each call: a lazy device begins what it was given so far."""
    settle: Callable[[], object] = lambda: None
    """Wait until the device has done what it was given."""

    @property
    def makes_values(self) -> bool:
        """Values are made and compared on the device itself, not on the processor: on a Neuron core
        each such operation would be a program to be compiled."""
        return self.device.type == "cuda"


def open_device(hardware: RankHardware, local_rank: int) -> RankDevice:
    """Return a rank's device.

    Args:
        hardware: the kind of device.
        local_rank: the rank's place on its node.

    Raises:
        DeviceMissing: with what is missing.
    """
    try:
        import torch
    except ImportError:
        raise DeviceMissing("torch is not installed") from None
    if hardware is RankHardware.CPU:
        return RankDevice(torch.device("cpu"), "gloo")
    if hardware is RankHardware.NEURON:
        return open_neuron_core()
    if not torch.cuda.is_available():
        raise DeviceMissing("torch sees no GPU")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return RankDevice(device, "nccl", settle=lambda: torch.cuda.synchronize(device))


def open_neuron_core() -> RankDevice:
    """Return the Neuron core that this process sees.

    Raises:
        DeviceMissing: torch-neuronx is not installed.
    """
    flags = os.environ.get("NEURON_CC_FLAGS", "")
    if COMPILER not in flags:
        os.environ["NEURON_CC_FLAGS"] = f"{flags} {COMPILER}".strip()
    try:
        import torch
        import torch_neuronx  # noqa: F401  # registers the cores with torch, or with torch_xla
    except ImportError as error:
        raise DeviceMissing(f"{error.name} is not installed") from None
    try:
        import torch_xla.core.xla_model as xla
        import torch_xla.distributed.xla_backend  # noqa: F401  # registers `xla` and `xla://`
    except ImportError:
        neuron = getattr(torch, "neuron", None)
        if neuron is None:
            raise DeviceMissing("torch_xla is not installed, and torch knows no neuron") from None
        return RankDevice(torch.device("neuron"), "neuron", "env://", settle=neuron.synchronize)
    return RankDevice(xla.xla_device(), "xla", "xla://", xla.mark_step, xla.wait_device_ops)


def control_group(device: RankDevice, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return the group in which the ranks agree on numbers; None: the one that is measured.

    torch_xla's barrier waits for no other rank, and Neuron cores know neither float64 nor int64.
    """
    import torch.distributed as dist

    if not device.init_method:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group
