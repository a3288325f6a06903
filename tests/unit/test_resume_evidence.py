"""A signal that ended a step is the user's, unless Slurm has ended the job."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.decide.classify import Cause, classify
from slurm_resilience.resume.evidence import gather_evidence
from slurm_resilience.resume.live_step.live_steps import StepEnd


def cause(slurm: FakeSlurm, allocation: Allocation, signal: str) -> Cause:
    step: Any = SimpleNamespace(ran_for=9.0, cancelled=False, aborted=False, ended_tasks=[])
    context: Any = SimpleNamespace(
        allocation=allocation,
        link=SimpleNamespace(faulty=dict),
        user_ended=lambda step, stopped: signal,
        clock=SystemClock(),
    )
    fence: Any = SimpleNamespace(progress=lambda: -1)
    ending = gather_evidence(context, fence, StepEnd(143, step), allocation.nodes, -1)
    return classify(ending)


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm(4)


def allocated(slurm: FakeSlurm) -> Allocation:
    job = slurm.job(slurm.submit(2))
    return Allocation(slurm, job, Event(), patience=0.0, permits_expansion=True)


def test_a_users_sigterm_is_the_users(slurm: FakeSlurm) -> None:
    assert cause(slurm, allocated(slurm), "SIGTERM").kind == "user"


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGHUP"])
def test_a_requeued_job_was_not_ended_by_its_user(slurm: FakeSlurm, signal: str) -> None:
    allocation = allocated(slurm)
    slurm.requeue(allocation.id)
    seen = cause(slurm, allocation, signal)
    assert (seen.kind, "user" in seen.reason) == ("job_over", False)


def test_ctrl_c_does_not_wait_for_slurm(slurm: FakeSlurm) -> None:
    allocation = allocated(slurm)
    slurm.before["job"] = lambda: pytest.fail("Slurm was asked")
    assert cause(slurm, allocation, "SIGINT twice").kind == "user"


def test_while_slurm_does_not_answer_the_signal_counts(slurm: FakeSlurm) -> None:
    allocation = allocated(slurm)
    slurm.refusals["job"] = SlurmUnreachable("no answer")
    assert cause(slurm, allocation, "SIGTERM").kind == "user"
