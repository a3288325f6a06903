"""Write to the scratch directory, read back and compare, by fio."""

from __future__ import annotations

import json

from slurm_resilience.deepcheck.deep_results import DeepResult
from slurm_resilience.deepcheck.instance.instance_check import (
    InstanceCheck,
    InstanceContext,
    judged,
)
from slurm_resilience.deepcheck.tool_call import run_tool
from slurm_resilience.health.check import Unjudged
from slurm_resilience.health.documents.fio_result import fio_rate, judge_fio, recognises_fio

FILE_MIB = 256
MARGIN_SECONDS = 300.0
"""Seconds beyond the load's time, for a slow disk to take the file and give it back."""


def _run(context: InstanceContext) -> DeepResult:
    words = ["fio", "--name=sres-deepcheck", f"--directory={context.scratch}", "--rw=write"]
    words += ["--bs=1M", f"--size={FILE_MIB}M", "--ioengine=psync", "--end_fsync=1"]
    words += ["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--unlink=1"]
    told = run_tool([*words, "--output-format=json"], context.seconds + MARGIN_SECONDS)
    try:
        data = json.loads(told.out[told.out.index("{") :])
    except ValueError:
        data = None
    if not recognises_fio(data):
        said = " ".join(told.both.split())[:200] or "nothing"
        raise Unjudged(f"fio exited {told.code} without a result; it said: {said}")
    write, read = fio_rate(data, "write"), fio_rate(data, "read")
    text = f"{context.scratch}: {write:.0f} MB/s written, {read:.0f} MB/s read back and compared"
    return judged("disk", judge_fio(data), text, output=told.both)


DISK = InstanceCheck("disk", _run, about="data read back from the disk (fio)")
