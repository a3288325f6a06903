"""A collective among the GPUs of the node: by nccl-tests where it is installed, else torch.

Without a GPU two processes do it on the processors, which shows that the node's software works.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil

from slurm_resilience.deepcheck.collective_math import Collective, wrong_elements
from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.instance.instance_check import InstanceCheck, InstanceContext
from slurm_resilience.deepcheck.report_forms import collective_table
from slurm_resilience.deepcheck.step_lines import GroupSwept, GroupTrouble, LineAssembler
from slurm_resilience.deepcheck.step_requests import CollectiveRequest, RankGroup, RankHardware
from slurm_resilience.deepcheck.tool_call import ToolOutput, run_tool, start_program
from slurm_resilience.health.check import Unjudged
from slurm_resilience.model import Severity

PROGRAM = "slurm_resilience.deepcheck.torch_programs.collective_program"
NCCL_TEST = "all_reduce_perf"
LIMIT_SECONDS = 600.0
CPU_RANKS = 2
FIRST_PORT, PORTS = 20_000, 12_000
LARGEST_ON_GPUS_BYTES = 256 << 20
LARGEST_ON_CPUS_BYTES = 1 << 20
_WRONG = re.compile(r"^# Out of bounds values : (\d+) (OK|FAILED)", re.M)
_AVERAGE = re.compile(r"^# Avg bus bandwidth\s*: (\S+)", re.M)


def _run(context: InstanceContext) -> DeepResult:
    ranks = context.gpus
    if ranks > 1 and shutil.which(NCCL_TEST):
        words = [
            NCCL_TEST,
            "-b",
            "8",
            "-e",
            str(LARGEST_ON_GPUS_BYTES),
            "-f",
            "4",
            "-g",
            str(ranks),
        ]
        return _of_nccl_tests(run_tool(words, LIMIT_SECONDS))
    return _of_torch(context, ranks if ranks > 1 else CPU_RANKS, ranks > 1)


def _of_nccl_tests(told: ToolOutput) -> DeepResult:
    wrong, average = _WRONG.search(told.out), _AVERAGE.search(told.out)
    if wrong is None or average is None:
        said = " ".join(told.both.split())[-200:] or "nothing"
        raise Unjudged(f"{NCCL_TEST} exited {told.code} without its last lines; it said: {said}")
    return _result(int(wrong[1]), f"{average[1]} GB/s on average", told.out, told.both)


def _of_torch(context: InstanceContext, ranks: int, gpus: bool) -> DeepResult:
    group = RankGroup(context.node, "127.0.0.1", FIRST_PORT + secrets.randbelow(PORTS))
    request = CollectiveRequest(
        (group,),
        (Collective.ALL_REDUCE, Collective.ALL_GATHER),
        largest_bytes=LARGEST_ON_GPUS_BYTES if gpus else LARGEST_ON_CPUS_BYTES,
        hardware=RankHardware.GPU if gpus else RankHardware.CPU,
        budget_seconds=context.seconds,
        limit_seconds=LIMIT_SECONDS,
    )
    place = {"SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_NUM_NODES": "1"}
    place["SLURMD_NODENAME"] = context.node
    with contextlib.ExitStack() as started:
        running = []
        for rank in range(ranks):
            one = start_program(PROGRAM, request, {**place, "SLURM_LOCALID": str(rank)})
            started.callback(one.kill)
            running.append(one)
        told = [one.end(LIMIT_SECONDS) for one in running]
    assembler = LineAssembler()
    messages = [assembler.feed(line) for one in told for line in one.out.splitlines()]
    sweeps = [one.sweep for one in messages if isinstance(one, GroupSwept)]
    output = "\n".join(one.both for one in told)
    for trouble in messages:
        if isinstance(trouble, GroupTrouble):
            raise Unjudged(trouble.text)
    if len(sweeps) < len(request.collectives):
        raise Unjudged(f"the ranks came to no result: {output.strip()[-200:]}")
    block = "\n".join(collective_table(sweep) for sweep in sweeps)
    text = f"{ranks} ranks on {'GPUs' if gpus else 'processors'}"
    return _result(sum(map(wrong_elements, sweeps)), text, block, output)


def _result(wrong: int, text: str, block: str, output: str) -> DeepResult:
    if wrong:
        said = f"{wrong} elements had a wrong value"
        return DeepResult(
            "collectives", DeepOutcome.FAILED, said, Severity.REPLACE, block=block, output=output
        )
    return DeepResult("collectives", DeepOutcome.PASSED, text, block=block, output=output)


COLLECTIVES = InstanceCheck(
    "collectives", _run, about="all-reduce among the GPUs (nccl-tests, else torch)"
)
