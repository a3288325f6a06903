"""GPUs that the driver sees, against those that Slurm gives to jobs and those on the PCI bus.

A missing GPU or a driver that does not answer asks for a reboot: that is what brings a GPU back
that fell off the bus, and what HyperPod's agent does; recurring, it becomes a replacement.
A GPU on the bus that the driver does not show is named. Where Slurm does not hand it out it is only
watched: an administrator may have taken a broken one out of slurm.conf.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.checks.gpu.nvml_session import bus_address, no_gpu_expected
from slurm_resilience.health.checks.pci_bus import nvidia_gpus
from slurm_resilience.model import Finding, Severity


class GpusSeen(NamedTuple):
    """``answering`` is None when the driver could not be asked; ``error`` then says why."""

    answering: int | None
    listed: int = 0
    """GPUs that the driver lists, those included that it has lost."""
    error: str = ""
    library: bool = True
    hidden: tuple[str, ...] = ()
    """Addresses of GPUs on the PCI bus that the driver does not show."""


def probe(context: CheckContext) -> GpusSeen:
    # Here, not above: a node without GPUs need not carry NVML's constants in memory.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return GpusSeen(None, error=str(error), library=not missing)
    try:
        listed, answering, trouble = int(pynvml.nvmlDeviceGetCount()), 0, ""
        shown = []
        for index in range(listed):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                answering += 1
            except pynvml.NVMLError as error:
                trouble = f"GPU {index}: {error}"
                continue
            with contextlib.suppress(pynvml.NVMLError):
                shown.append(bus_address(pynvml, handle))
        # Where one GPU does not say its address, the missing one cannot be told.
        hidden = _hidden(nvidia_gpus(context), shown) if len(shown) == answering else ()
        return GpusSeen(answering, listed, trouble, hidden=hidden)
    except pynvml.NVMLError as error:
        return GpusSeen(None, error=str(error))
    finally:
        # Held open, the library would keep a GPU from being reset.
        pynvml.nvmlShutdown()


def _hidden(on_bus: Iterable[str], shown: Iterable[str]) -> tuple[str, ...]:
    """Return what is on the bus only. NVML writes the domain with eight digits, sysfs with four."""
    known = {address.lower()[-12:] for address in shown}
    return tuple(address for address in on_bus if address.lower()[-12:] not in known)


def judge(seen: GpusSeen, context: CheckContext) -> Judgement:
    wanted = context.expected.gpus
    if wanted is None and seen.hidden:
        return _watched(f"{_have(seen)}; what Slurm expects is unknown", context)
    if wanted is None:
        raise Unjudged(f"{_have(seen)}; what Slurm expects is unknown")
    if seen.answering is None and wanted == 0:
        return Judgement("no GPU, and Slurm expects none")
    if not seen.library:
        raise Unjudged(f"{_have(seen)} (libnvidia-ml.so.1), Slurm expects {wanted} GPUs")
    text = f"{_have(seen)}, Slurm expects {wanted}"
    if seen.answering is not None and seen.answering >= wanted:
        return _watched(text, context) if seen.hidden else Judgement(text)
    finding = Finding(
        check=CHECK.name,
        severity=Severity.REBOOT,
        text=text,
        at=context.now,
        evidence=seen.error or f"{seen.answering} of {seen.listed} GPUs answer",
    )
    return Judgement(finding.text, (finding,))


def _watched(text: str, context: CheckContext) -> Judgement:
    finding = Finding(CHECK.name, Severity.MONITOR, text, context.now, code="hidden")
    return Judgement(text, (finding,))


def _have(seen: GpusSeen) -> str:
    if not seen.library:
        return "no NVML library"
    if seen.answering is None:
        return f"the NVIDIA driver does not answer ({seen.error})"
    said = [seen.error] if seen.error else []
    if seen.hidden:
        said.append(f"on the PCI bus, but not shown by the driver: {', '.join(seen.hidden)}")
    return f"{seen.answering} GPUs" + (f" ({'; '.join(said)})" if said else "")


CHECK = Check(
    "gpu_count",
    probe,
    judge,
    timeout=30.0,
    in_child=True,
    absent=no_gpu_expected,
    source="NVML, Slurm's Gres, /sys/bus/pci/devices",
    threshold="fewer GPUs answer than Slurm hands out; one on the PCI bus that the driver does not "
    "show and Slurm does not hand out is watched",
    asks_for=(Severity.REBOOT, Severity.MONITOR),
)
