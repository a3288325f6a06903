"""Look for devices on the PCI bus, by vendor and class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurm_resilience.health.check import CheckContext

ROOT = "/sys/bus/pci/devices"
NVIDIA, AMD = "0x10de", "0x1002"
GPU_CLASSES = ("0x0300", "0x0302")
"""Graphics adapters with and without a connector for a screen."""


def has_device(context: CheckContext, vendor: str, classes: tuple[str, ...]) -> bool | None:
    """Tell whether there is such a device; None where the bus cannot be read.

    Args:
        context: says where /sys is.
        vendor: as in sysfs, `0x10de`.
        classes: beginnings of the class, as in sysfs.
    """
    if not context.path(ROOT).is_dir():
        return None
    return any(True for _ in _devices(context, vendor, classes))


def nvidia_gpus(context: CheckContext) -> tuple[str, ...]:
    """Return the addresses of the GPUs that NVIDIA's driver has, or should have.

    A GPU of another driver (vfio-pci hands it to a virtual machine) is not among them, nor is the
    part of one that a virtual machine is given (an SR-IOV function).
    """
    return tuple(
        device.name
        for device in _devices(context, NVIDIA, GPU_CLASSES)
        if not (device / "physfn").exists() and _driver(device) in ("", "nvidia")
    )


def _driver(device: Path) -> str:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return ""


def _devices(context: CheckContext, vendor: str, classes: tuple[str, ...]) -> Iterator[Path]:
    root = context.path(ROOT)
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            if (device / "vendor").read_text("utf-8").strip() != vendor:
                continue
            if (device / "class").read_text("utf-8").startswith(classes):
                yield device
        except OSError:
            continue  # it has been taken out meanwhile
