"""How an attempt ended: what the step said, and what is known of its nodes."""

from __future__ import annotations

import time

from slurm_resilience.resume.carriers import End
from slurm_resilience.resume.classify import Ending
from slurm_resilience.resume.means import Means
from slurm_resilience.resume.ward import Ward


def inquest(means: Means, ward: Ward, end: End, nodes: tuple[str, ...], before: int) -> Ending:
    """Gather what `classify` needs; may wait a moment for what is found out about the nodes.

    Args:
        means: of the supervised srun.
        ward: knows the program's progress.
        end: of the attempt's last step.
        nodes: those of the attempt.
        before: the last step that was reported before this attempt.
    """
    step, stopped = end.step, end.stopped_by_us
    faulty = end.faulty | _faulty(means)
    state = means.allocation.job.state
    # A program that ended well, or was ended, is not kept waiting for Slurm's word.
    interrupted = "" if end.own_word else means.interrupted(step, stopped)
    if end.code != 0 and not interrupted:
        state = means.allocation.refresh()
        if state == "RUNNING" and not faulty and not step.cancelled and not end.own_word:
            faulty = _wait_for_diagnosis(means, nodes)
            state = means.allocation.refresh()
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


def _faulty(means: Means) -> dict[str, str]:
    return {name: verdict.reason for name, verdict in means.link.faulty().items()}


def _wait_for_diagnosis(means: Means, nodes: tuple[str, ...]) -> dict[str, str]:
    """A step that fails because of a node often ends before anybody has judged the node."""
    deadline = time.monotonic() + means.limits.diagnosis_wait
    means.link.ask(nodes)
    while True:
        bad = _faulty(means) | means.allocation.bad(nodes)
        left = deadline - time.monotonic()
        if bad or left <= 0 or means.allocation.leave.is_set():
            return bad
        means.wake.clear()
        means.wake.wait(min(left, 0.5))
