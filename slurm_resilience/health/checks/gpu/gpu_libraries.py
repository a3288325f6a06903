"""The driver's libraries: there, not empty, and loadable.

An image that was built beside a GPU may bring an empty libnvidia-ml.so.1: programs then fail on a
node whose GPUs are well. Watched, never acted on: a new machine of the same image has it too.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.health.checks.gpu.nvml_session import no_nvidia_gpu
from slurm_resilience.model import Finding, Severity

LIBRARIES = ("libnvidia-ml.so.1", "libcuda.so.1")


class LibraryLoad(NamedTuple):
    """``error`` is the loader's own words; empty: it was loaded."""

    name: str
    error: str = ""


def probe(context: CheckContext) -> tuple[LibraryLoad, ...]:
    return tuple(map(_load, LIBRARIES))


def _load(name: str) -> LibraryLoad:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return LibraryLoad(name, str(error))
    return LibraryLoad(name)


def judge(seen: tuple[LibraryLoad, ...], context: CheckContext) -> Judgement:
    if context.expected.gpus is None and all(one.error for one in seen):
        return Judgement("no library of the NVIDIA driver; what Slurm expects is unknown")
    findings = tuple(
        Finding(
            CHECK.name,
            Severity.MONITOR,
            f"{one.name} cannot be loaded: {one.error}",
            context.now,
            subject=one.name,
        )
        for one in seen
        if one.error
    )
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{', '.join(one.name for one in seen)} can be loaded", findings)


CHECK = Check(
    "gpu_libraries",
    probe,
    judge,
    timeout=30.0,
    period=3600.0,
    in_child=True,
    absent=no_nvidia_gpu,
    source=f"the loader: {', '.join(LIBRARIES)}",
    threshold="missing, empty or not loadable where Slurm expects GPUs",
    asks_for=(Severity.MONITOR,),
)
