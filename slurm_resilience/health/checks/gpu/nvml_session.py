"""Open NVIDIA's library for one look."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from slurm_resilience.health.check import CheckContext, Unjudged
from slurm_resilience.health.checks.pci_bus import NVIDIA, has_device


def no_gpu_expected(context: CheckContext) -> str:
    """Return that Slurm and the profile expect no GPU; empty where they do, or do not say."""
    if context.expected.gpus == 0 and not context.expected.profile.gpus:
        return "no GPU, and Slurm expects none"
    return ""


def no_nvidia_gpu(context: CheckContext) -> str:
    """Return why there is no GPU for NVIDIA's driver; empty where there is one, or may be one."""
    if has_device(context, NVIDIA, ("0x03",)) is False:
        return "no NVIDIA GPU on the PCI bus"
    return no_gpu_expected(context)


@contextlib.contextmanager
def nvml_session() -> Iterator[Any]:
    """Hand out pynvml with the library open; held open, it would keep a GPU from being reset.

    Raises:
        Unjudged: the library or the driver is missing, or does not answer. `gpu_count` judges that.
    """
    # Here, not above: only a probe's process carries NVML's constants in memory.
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise Unjudged(f"NVML does not answer: {error}") from None


def bus_address(nvml: Any, handle: Any) -> str:
    """Return a GPU's address on the PCI bus, as NVML writes it."""
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    return bus.decode() if isinstance(bus, bytes) else str(bus)
