"""Run the checks of the instance level on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from slurm_resilience import config
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.deep_logs import NodeLog, stamp
from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult, DeepState, end_of
from slurm_resilience.deepcheck.instance.instance_check import InstanceCheck, InstanceContext
from slurm_resilience.deepcheck.instance.instance_checks import chosen
from slurm_resilience.deepcheck.instance.scratch import scratch_directory
from slurm_resilience.deepcheck.step_lines import CheckBegun, CheckEnded, ChecksDone, StepMessage
from slurm_resilience.deepcheck.step_requests import InstanceRequest
from slurm_resilience.health.check import CheckContext, Expected, Unjudged
from slurm_resilience.health.checks.host import software
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.profile_files import load_profile


def check_this_node(
    request: InstanceRequest, node: str, tell: Callable[[StepMessage], None]
) -> tuple[DeepResult, ...]:
    """Run checks one after the other; return their results.

    Args:
        request: the checks, and where the log goes.
        node: the node's name.
        tell: takes each message as it comes.

    Raises:
        SresError: the request names what there is not.
        OSError: a directory cannot be used.
    """
    results = []
    with scratch_directory(request.scratch, SYSTEM_CLOCK.now()) as scratch:
        context = _context(request, node, scratch)
        log = NodeLog(request.log.replace("%n", node))
        for check in chosen(request.only):
            begun = CheckBegun(node, check.name)
            result = run_check(check, context, partial(tell, begun))
            results.append(result)
            log.write(stamp(context.clock.now()), result)
            tell(CheckEnded(node, result))
    if end_of(results)[0] is DeepState.PASSED:
        software.remember(context.checks)
    tell(ChecksDone(node))
    return tuple(results)


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


def run_check(
    check: InstanceCheck, context: InstanceContext, begins: Callable[[], object] = lambda: None
) -> DeepResult:
    """Return the result of one check; whatever goes wrong within it leaves the node unjudged.

    Args:
        check: which one.
        context: of the node.
        begins: is called before the check, where the node has what it looks at.
    """
    begun = context.clock.monotonic()
    try:
        if reason := check.absent(context):
            result = DeepResult(check.name, DeepOutcome.ABSENT, reason)
        else:
            begins()
            result = check.run(context)
    except Unjudged as reason:
        result = DeepResult(check.name, DeepOutcome.UNJUDGED, str(reason) or "cannot tell")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        result = DeepResult(check.name, DeepOutcome.UNJUDGED, text)
    return msgspec.structs.replace(result, seconds=context.clock.monotonic() - begun)
