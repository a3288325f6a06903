"""MIG devices (parts of a GPU), against the profile of the node's type.

Watched, never acted on: a layout that a person forgot to make is configuration, not hardware, and a
new machine would have it no more.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.health.checks.gpu.nvml_session import (
    bus_address,
    no_nvidia_gpu,
    nvml_session,
)
from slurm_resilience.model import Finding, Severity


class MigLayout(NamedTuple):
    """The parts of one GPU, by the names of their kinds (`1g.10gb`)."""

    gpu: str
    enabled: bool
    parts: tuple[str, ...] = ()


def probe(context: CheckContext) -> tuple[MigLayout, ...]:
    layouts = []
    with nvml_session() as nvml:
        for index in range(int(nvml.nvmlDeviceGetCount())):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                layouts.append(_layout(nvml, handle, bus_address(nvml, handle)))
            except nvml.NVMLError:
                continue  # a lost GPU: others judge that
    return tuple(layouts)


def _layout(nvml: Any, handle: Any, gpu: str) -> MigLayout:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return MigLayout(gpu, False)
    if not current:
        return MigLayout(gpu, False)
    parts = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            continue  # no such part
        name = nvml.nvmlDeviceGetName(part)
        text = name.decode() if isinstance(name, bytes) else str(name)
        parts.append(text.rpartition("MIG ")[2].strip())
    return MigLayout(gpu, True, tuple(sorted(parts)))


def judge(seen: tuple[MigLayout, ...], context: CheckContext) -> Judgement:
    wanted = context.expected.profile.mig_devices
    have = Counter(part for one in seen for part in one.parts)
    text = f"MIG devices: {_words(have)}"
    if wanted is None or have == Counter(wanted):
        return Judgement(text)
    text = f"{text}; the profile expects {_words(wanted)}"
    evidence = "; ".join(f"{one.gpu}: {', '.join(one.parts)}" for one in seen if one.enabled)
    finding = Finding(CHECK.name, Severity.MONITOR, text, context.now, evidence=evidence)
    return Judgement(text, (finding,))


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()) if count) or "none"


CHECK = Check(
    "mig_devices",
    probe,
    judge,
    timeout=60.0,
    period=600.0,
    in_child=True,
    absent=no_nvidia_gpu,
    source="NVML",
    threshold="other than the profile's mig_devices",
    asks_for=(Severity.MONITOR,),
)
