"""Processes that hold a GPU outside every job: left behind, or started by hand.

Watched, never acted on: the next job meets less memory, and the process may be a person's. A job's
processes have a slurmstepd above them, or stand in a control group of their job.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.health.checks.gpu.nvml_session import (
    bus_address,
    no_nvidia_gpu,
    nvml_session,
)
from slurm_resilience.model import Finding, Severity

SERVICES = frozenset(
    {"nvidia-cuda-mps", "nv-hostengine", "nvidia-persiste", "nv-fabricmanage", "dcgm-exporter"}
)
"""Names of NVIDIA's own services, cut to the 15 characters that the kernel keeps."""
_JOB_GROUP = re.compile(r"/job_[0-9]+(?:/|$)", re.MULTILINE)
MAX_ANCESTORS = 64
NAMED = 3
"""Processes that the text names."""


class GpuProcess(NamedTuple):
    pid: int
    started: int
    """Ticks since the node booted: a pid is used again."""
    name: str
    gpu: str
    of_job: bool


def probe(context: CheckContext) -> tuple[GpuProcess, ...]:
    found = set()
    with nvml_session() as nvml:
        for index in range(int(nvml.nvmlDeviceGetCount())):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = bus_address(nvml, handle)
                pids = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            except nvml.NVMLError:
                continue  # a lost GPU: others judge that
            found |= {one for pid in pids if (one := _look(context.path("/proc"), pid, gpu))}
    return tuple(sorted(found))


def _look(proc: Path, pid: int, gpu: str) -> GpuProcess | None:
    """Return a process and whether it is a job's; None: it has ended meanwhile."""
    status = _status(proc, pid)
    if status is None:
        return None
    name, parent, started = status
    try:
        of_job = bool(_JOB_GROUP.search((proc / str(pid) / "cgroup").read_text("utf-8")))
    except OSError:
        of_job = False
    for _ in range(MAX_ANCESTORS):
        above = None if of_job or parent <= 1 else _status(proc, parent)
        if above is None:
            break
        of_job, parent = above[0] == "slurmstepd", above[1]
    return GpuProcess(pid, started, name, gpu, of_job)


def _status(proc: Path, pid: int) -> tuple[str, int, int] | None:
    """Return name, parent and start of a process."""
    try:
        text = (proc / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The name stands in brackets, and may itself hold some.
    head, _, tail = text.rpartition(") ")
    fields = tail.split()
    if len(fields) < 20:
        return None
    return head.partition("(")[2], int(fields[1]), int(fields[19])


def judge(seen: tuple[GpuProcess, ...], context: CheckContext) -> Judgement:
    outside = {one for one in seen if not one.of_job and one.name not in SERVICES}
    before = context.earlier[-1] if context.earlier else ()
    stay = sorted(outside.intersection(before))
    if not stay:
        return Judgement(f"{len(seen)} processes use GPUs, {len(outside)} of them outside jobs")
    findings = tuple(
        Finding(
            CHECK.name,
            Severity.MONITOR,
            f"{one.name} ({one.pid}) uses GPU {one.gpu} outside every job",
            context.now,
            subject=f"{one.gpu.lower()} {one.pid}",
        )
        for one in stay
    )
    text = "; ".join(one.text for one in findings[:NAMED])
    more = f"; and {len(findings) - NAMED} more" if len(findings) > NAMED else ""
    return Judgement(text + more, findings)


CHECK = Check(
    "gpu_processes",
    probe,
    judge,
    timeout=60.0,
    period=300.0,
    in_child=True,
    absent=no_nvidia_gpu,
    remembers=1,
    source="NVML, /proc/*/{stat,cgroup}",
    threshold="the same process outside every job in two rounds",
    asks_for=(Severity.MONITOR,),
)
