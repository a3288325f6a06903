"""Multiplications and memory whose results are known beforehand, through torch.

On GPUs it stands in for DCGM where that is missing; on processors it always runs.
"""

from __future__ import annotations

import shutil
from functools import partial

from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.instance.instance_check import (
    InstanceCheck,
    InstanceContext,
    no_gpu,
)
from slurm_resilience.deepcheck.step_lines import Burned, GroupTrouble, LineAssembler
from slurm_resilience.deepcheck.step_requests import BurnRequest
from slurm_resilience.deepcheck.tool_call import start_program
from slurm_resilience.health.check import Unjudged
from slurm_resilience.model import Severity

PROGRAM = "slurm_resilience.deepcheck.torch_programs.burn_program"
START_SECONDS = 300.0
"""Seconds for the start, and for memory to be written and read back."""
GPU_MEMORY_SHARE, CPU_MEMORY_SHARE = 0.8, 0.05


def _run(gpus: bool, context: InstanceContext) -> DeepResult:
    name = "gpu_burn" if gpus else "cpu_burn"
    share = GPU_MEMORY_SHARE if gpus else CPU_MEMORY_SHARE
    request = BurnRequest(gpus, context.seconds, share)
    told = start_program(PROGRAM, request).end(context.seconds + START_SECONDS)
    assembler = LineAssembler()
    messages = [assembler.feed(line) for line in told.out.splitlines()]
    burned = [one for one in messages if isinstance(one, Burned)]
    for trouble in messages:
        if isinstance(trouble, GroupTrouble):
            raise Unjudged(trouble.text)
    if told.code != 0 or not burned:
        raise Unjudged(f"the load ended with code {told.code}: {told.err.strip()[-200:]}")
    if gpus and len(burned) < context.gpus:
        raise Unjudged(f"torch sees {len(burned)} GPUs, {context.gpus} are expected")
    wrong = [one for one in burned if one.wrong or one.memory_wrong]
    if wrong:
        text = "; ".join(
            f"{one.device}: {one.wrong} wrong elements, {one.memory_wrong} wrong words in memory"
            for one in wrong
        )
        return DeepResult(name, DeepOutcome.FAILED, text, Severity.REPLACE, output=told.both)
    text = "; ".join(
        f"{one.device}: {one.multiplications} products at {one.gigaflops:.0f} GFLOP/s and "
        f"{one.memory_bytes >> 20} MiB were right"
        for one in burned
    )
    return DeepResult(name, DeepOutcome.PASSED, text, output=told.both)


def _not_needed(context: InstanceContext) -> str:
    if reason := no_gpu(context):
        return reason
    return "DCGM loads the GPUs (dcgm_r4)" if shutil.which("dcgmi") else ""


GPU_BURN = InstanceCheck(
    "gpu_burn",
    partial(_run, True),
    _not_needed,
    about="the same on every GPU, where DCGM is not installed (torch)",
)
CPU_BURN = InstanceCheck(
    "cpu_burn", partial(_run, False), about="products and memory with known values (torch)"
)
