"""Look for devices on the PCI bus, by vendor and class."""

from __future__ import annotations

from slurm_resilience.health.check import CheckContext

ROOT = "/sys/bus/pci/devices"
NVIDIA, AMD = "0x10de", "0x1002"


def has_device(context: CheckContext, vendor: str, classes: tuple[str, ...]) -> bool | None:
    """Tell whether there is such a device; None where the bus cannot be read.

    Args:
        context: says where /sys is.
        vendor: as in sysfs, `0x10de`.
        classes: beginnings of the class, as in sysfs.
    """
    root = context.path(ROOT)
    if not root.is_dir():
        return None
    for device in root.iterdir():
        try:
            if (device / "vendor").read_text("utf-8").strip() != vendor:
                continue
            if (device / "class").read_text("utf-8").startswith(classes):
                return True
        except OSError:
            continue  # it has been taken out meanwhile
    return False
