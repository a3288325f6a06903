"""All processors at full load with input and output, by stress-ng, which verifies its results."""

from __future__ import annotations

from slurm_resilience.deepcheck.deep_results import DeepResult
from slurm_resilience.deepcheck.instance.instance_check import (
    InstanceCheck,
    InstanceContext,
    judged,
)
from slurm_resilience.deepcheck.tool_call import run_tool
from slurm_resilience.health.documents.tool_text import judge_stress_ng

MARGIN_SECONDS = 60.0
"""Seconds for its start and its end."""


def _run(context: InstanceContext) -> DeepResult:
    words = ["stress-ng", "--cpu", "0", "--io", "1", "--vm", "1", "--vm-bytes", "10%", "--verify"]
    words += ["--timeout", f"{max(1, round(context.seconds))}s", "--metrics-brief"]
    words += ["--temp-path", str(context.scratch)]
    told = run_tool(words, context.seconds + MARGIN_SECONDS)
    text = f"all processors were loaded for {context.seconds:g} s"
    return judged("cpu_stress", judge_stress_ng(told.both), text, output=told.both)


CPU_STRESS = InstanceCheck(
    "cpu_stress", _run, about="all processors and input/output under load, verified (stress-ng)"
)
