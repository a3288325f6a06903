"""How an attempt ended: what the step said, and what is known of its nodes."""

from __future__ import annotations

import time

from slurm_resilience.resume.context import Context
from slurm_resilience.resume.decide.classify import Ending
from slurm_resilience.resume.live_step.live_steps import StepEnd
from slurm_resilience.resume.ward import Ward


def gather_evidence(
    context: Context, ward: Ward, end: StepEnd, nodes: tuple[str, ...], before: int
) -> Ending:
    """Gather what `classify` needs; may wait a moment for what is found out about the nodes.

    Args:
        context: of the supervised srun.
        ward: knows the program's progress.
        end: of the attempt's last step.
        nodes: those of the attempt.
        before: the last step that was reported before this attempt.
    """
    step, stopped = end.step, end.stopped_by_us
    faulty = end.faulty | _faulty(context)
    state = context.allocation.job.state
    # A program that ended well, or was ended, is not kept waiting for Slurm's word.
    interrupted = "" if end.own_word else context.interrupted(step, stopped)
    if end.code != 0 and not interrupted:
        state = context.allocation.refresh()
        if state == "RUNNING" and not faulty and not step.cancelled and not end.own_word:
            faulty = _wait_for_diagnosis(context, nodes)
            state = context.allocation.refresh()
    return Ending(
        code=end.code,
        ran_for=step.ran_for,
        progressed=ward.progress() > before,
        job_state=state,
        faulty=faulty,
        interrupted=interrupted,
        cancelled=not end.own_word and (step.cancelled or (step.aborted and not faulty)),
        stopped_by_us=stopped,
    )


def _faulty(context: Context) -> dict[str, str]:
    return {name: verdict.reason for name, verdict in context.link.faulty().items()}


def _wait_for_diagnosis(context: Context, nodes: tuple[str, ...]) -> dict[str, str]:
    """A step that fails because of a node often ends before anybody has judged the node."""
    deadline = time.monotonic() + context.limits.diagnosis_wait
    context.link.ask(nodes)
    while True:
        bad = _faulty(context) | context.allocation.bad(nodes)
        left = deadline - time.monotonic()
        if bad or left <= 0 or context.allocation.leave.is_set():
            return bad
        context.wake.clear()
        context.wake.wait(min(left, 0.5))
