"""GPUs that the driver sees, against the GPUs that Slurm gives to jobs.

A missing GPU or a driver that does not answer asks for a reboot: that is what brings a GPU back
that fell off the bus, and what HyperPod's agent does; recurring, it becomes a replacement.
"""

from __future__ import annotations

from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.checks.gpu.nvml_session import no_gpu_expected
from slurm_resilience.model import Finding, Severity


class GpusSeen(NamedTuple):
    """``answering`` is None when the driver could not be asked; ``error`` then says why."""

    answering: int | None
    listed: int = 0
    """GPUs that the driver lists, those included that it has lost."""
    error: str = ""
    library: bool = True


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
        for index in range(listed):
            try:
                pynvml.nvmlDeviceGetHandleByIndex(index)
                answering += 1
            except pynvml.NVMLError as error:
                trouble = f"GPU {index}: {error}"
        return GpusSeen(answering, listed, trouble)
    except pynvml.NVMLError as error:
        return GpusSeen(None, error=str(error))
    finally:
        # Held open, the library would keep a GPU from being reset.
        pynvml.nvmlShutdown()


def judge(seen: GpusSeen, context: CheckContext) -> Judgement:
    wanted = context.expected.gpus
    if wanted is None:
        raise Unjudged(f"{_have(seen)}; what Slurm expects is unknown")
    if seen.answering is None and wanted == 0:
        return Judgement("no GPU, and Slurm expects none")
    if not seen.library:
        raise Unjudged(f"{_have(seen)} (libnvidia-ml.so.1), Slurm expects {wanted} GPUs")
    text = f"{_have(seen)}, Slurm expects {wanted}"
    if seen.answering is not None and seen.answering >= wanted:
        return Judgement(text)
    finding = Finding(
        check=CHECK.name,
        severity=Severity.REBOOT,
        text=text,
        at=context.now,
        evidence=seen.error or f"{seen.answering} of {seen.listed} GPUs answer",
    )
    return Judgement(finding.text, (finding,))


def _have(seen: GpusSeen) -> str:
    if not seen.library:
        return "no NVML library"
    if seen.answering is None:
        return f"the NVIDIA driver does not answer ({seen.error})"
    return f"{seen.answering} GPUs" + (f" ({seen.error})" if seen.error else "")


CHECK = Check(
    "gpu_count",
    probe,
    judge,
    timeout=30.0,
    in_child=True,
    absent=no_gpu_expected,
    source="NVML, Slurm's Gres",
    threshold="fewer GPUs answer than Slurm hands out",
    asks_for=(Severity.REBOOT,),
)
