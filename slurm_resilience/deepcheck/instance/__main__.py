"""Run the checks of this node: the program of a step, which needs no sresctld.

It is given an `InstanceRequest` as JSON, and prints a line for each check that begins and ends. The
full output of the tools goes into the node's log alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import msgspec

from slurm_resilience import config
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.deep_logs import NodeLog, stamp
from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.instance.instance_check import InstanceCheck, InstanceContext
from slurm_resilience.deepcheck.instance.instance_checks import chosen
from slurm_resilience.deepcheck.step_lines import (
    CheckBegun,
    CheckEnded,
    ChecksDone,
    StepMessage,
    as_lines,
)
from slurm_resilience.deepcheck.step_requests import InstanceRequest
from slurm_resilience.errors import SresError
from slurm_resilience.health.check import CheckContext, Expected, Unjudged
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.profile_files import load_profile

MAX_TOLD_CHARACTERS = 4000
"""The end of a tool's output that goes over the network; the node's log has all of it."""


def _tell(node: str, message: StepMessage) -> None:
    for line in as_lines(node, message):
        print(line, flush=True)


def _context(request: InstanceRequest, node: str, scratch: Path) -> InstanceContext:
    settings = config.load(None)
    profile = request.profile or settings.checks.profile
    expected = Expected(
        gpus=request.gpus, profile=load_profile(profile) if profile else NodeProfile()
    )
    checks = CheckContext(
        Path(settings.agent.sysroot), settings.checks, expected, SYSTEM_CLOCK.now()
    )
    return InstanceContext(node, checks, request.seconds, scratch)


def run_check(check: InstanceCheck, context: InstanceContext) -> DeepResult:
    """Return the result of one check; whatever goes wrong within it leaves the node unjudged."""
    begun = context.clock.monotonic()
    try:
        if reason := check.absent(context):
            result = DeepResult(check.name, DeepOutcome.ABSENT, reason)
        else:
            result = check.run(context)
    except Unjudged as reason:
        result = DeepResult(check.name, DeepOutcome.UNJUDGED, str(reason) or "cannot tell")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        result = DeepResult(check.name, DeepOutcome.UNJUDGED, text)
    return msgspec.structs.replace(result, seconds=context.clock.monotonic() - begun)


def _run(request: InstanceRequest, node: str, scratch: Path) -> None:
    context = _context(request, node, scratch)
    log = NodeLog(request.log.replace("%n", node))
    for check in chosen(request.only):
        _tell(node, CheckBegun(node, check.name))
        result = run_check(check, context)
        log.write(stamp(context.clock.now()), result)
        told = msgspec.structs.replace(result, output=result.output[-MAX_TOLD_CHARACTERS:])
        _tell(node, CheckEnded(node, told))
    _tell(node, ChecksDone(node))


def main() -> int:
    """Run the entry of the step."""
    try:
        request = msgspec.json.decode(sys.argv[1], type=InstanceRequest)
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        directory = request.scratch or None
        with tempfile.TemporaryDirectory(prefix="sres-deepcheck-", dir=directory) as scratch:
            _run(request, node, Path(scratch))
    except (SresError, OSError, IndexError, msgspec.MsgspecError) as error:
        print(f"sres deepcheck: error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, SresError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
