"""DCGM's own diagnostic, `dcgmi diag -r 2` and `-r 4`, of DCGM 3 and 4.

dcgmi exits with 226 after any failed test, and with others although all passed, so its exit code
says nothing: the document counts.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from slurm_resilience.deepcheck.deep_logs import stamp
from slurm_resilience.deepcheck.deep_results import DeepResult
from slurm_resilience.deepcheck.instance.instance_check import (
    InstanceCheck,
    InstanceContext,
    judged,
    no_gpu,
)
from slurm_resilience.deepcheck.report_forms import dcgm_summary
from slurm_resilience.deepcheck.tool_call import run_tool
from slurm_resilience.health.check import Unjudged
from slurm_resilience.health.documents.dcgm_diag import judge_dcgm_diag, recognises_dcgm_diag
from slurm_resilience.health.documents.dcgm_facts import dcgm_facts

TIMEOUT_SECONDS = {2: 900.0, 4: 10_800.0}
"""Level 2 was seen to take ten minutes, level 4 up to three hours."""


def _run(level: int, context: InstanceContext) -> DeepResult:
    told = run_tool(["dcgmi", "diag", "-r", str(level), "-j"], TIMEOUT_SECONDS[level])
    data = _document(told.out)
    if data is None:
        said = " ".join(told.both.split())[:200] or "nothing"
        raise Unjudged(f"dcgmi exited {told.code} without a document; it said: {said}")
    reading = judge_dcgm_diag(data)
    facts = dcgm_facts(data, reading, level)
    block = dcgm_summary(stamp(context.clock.now()), facts)
    text = f"DCGM {facts.version} found no fault at level {level}".replace("  ", " ")
    return judged(f"dcgm_r{level}", reading, text, block, told.out)


def _document(text: str) -> dict[str, Any] | None:
    """Return the document, which lines of the host engine may stand before and after."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            data, _ = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            data = None
        if recognises_dcgm_diag(data):
            assert isinstance(data, dict)
            return data
        at = text.find("{", at + 1)
    return None


DCGM_R2 = InstanceCheck(
    "dcgm_r2", partial(_run, 2), no_gpu, by_default=False, about="DCGM diagnostics, level 2"
)
DCGM_R4 = InstanceCheck("dcgm_r4", partial(_run, 4), no_gpu, about="DCGM diagnostics, level 4")
