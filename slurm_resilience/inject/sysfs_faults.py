"""Faults that show as files of sysfs: what each of them changes in a node's tree.

They are for a lab: a tree that is laid over a real node's /sys would hide its hardware from all
that runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from slurm_resilience.errors import UsageError
from slurm_resilience.health.checks.accelerator import neuron_devices
from slurm_resilience.health.checks.host import edac_counters
from slurm_resilience.health.checks.network import efa_devices, infiniband_ports
from slurm_resilience.inject.fault_catalogue import InjectedFault

ChangedFiles = Mapping[str, str]
"""By absolute path of a node, the text that a file is to have."""
DOWN, DISABLED = "1: DOWN", "3: Disabled"
EFA_DEVICE = "rdmap0s29"
"""The device that goes down on a node that shows none."""


def changed_files(fault: InjectedFault, sysroot: Path) -> ChangedFiles:
    """Return the files that a fault changes, from the tree as it is.

    Args:
        fault: one of the way `sysfs`.
        sysroot: the node's root directory, as sresd has it.

    Raises:
        UsageError: the node shows nothing that the fault could happen to.
    """
    return _CHANGES[fault.name](sysroot)


def _devices(sysroot: Path, is_efa: bool) -> Iterator[Path]:
    for device in sorted((sysroot / infiniband_ports.ROOT.lstrip("/")).glob("*")):
        if (_text(device / "device" / "vendor") == efa_devices.AMAZON) == is_efa:
            yield device


def _efa_port(sysroot: Path) -> ChangedFiles:
    device = next(_devices(sysroot, is_efa=True), None)
    kind = _text(device / "device" / "device") if device else "0xefa1"
    base = f"{efa_devices.ROOT}/{device.name if device else EFA_DEVICE}"
    return {
        f"{base}/device/vendor": efa_devices.AMAZON,
        f"{base}/device/device": kind,
        f"{base}/ports/1/state": DOWN,
    }


def _infiniband_port(sysroot: Path) -> ChangedFiles:
    for device in _devices(sysroot, is_efa=False):
        for port in sorted(device.glob("ports/*")):
            if "ACTIVE" in _text(port / "state"):
                base = f"{infiniband_ports.ROOT}/{device.name}/ports/{port.name}"
                return {f"{base}/state": DOWN, f"{base}/phys_state": DISABLED}
    raise UsageError(
        "the node shows no InfiniBand or RoCE port that is up, and one that never was is not used; "
        "give the lab's sresd a directory with one as agent.sysroot"
    )


def _memory_module(sysroot: Path) -> ChangedFiles:
    found = sorted((sysroot / edac_counters.ROOT.lstrip("/")).glob("mc[0-9]*/dimm[0-9]*"))
    name = f"{found[0].parent.name}/{found[0].name}" if found else "mc0/dimm0"
    return {f"{edac_counters.ROOT}/{name}/dimm_ue_count": "1"}


def _neuron_device(sysroot: Path) -> ChangedFiles:
    found = sorted((sysroot / neuron_devices.ROOT.lstrip("/")).glob("neuron[0-9]*"))
    base = f"{neuron_devices.ROOT}/{found[0].name if found else 'neuron0'}"
    return {f"{base}/stats/hardware/mem_ecc_uncorrected/total": "1"}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


_CHANGES: Mapping[str, Callable[[Path], ChangedFiles]] = MappingProxyType(
    {
        "efa-port-down": _efa_port,
        "ib-port-down": _infiniband_port,
        "memory-count": _memory_module,
        "neuron-count": _neuron_device,
    }
)
