"""Tasks that a killed srun left behind are ended before the next attempt starts."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.resume.decide.task_ends import NodeBegan, TaskEnd
from slurm_resilience.resume.srun import step as step_module
from slurm_resilience.resume.srun.step import SrunStep, end_step, end_tasks_left
from slurm_resilience.slurm.client import StepInfo

HOST = "login"
AWAY = SlurmUnreachable("Unable to contact slurm controller")


class SlurmWithAStep(FakeSlurm):
    """One job with one step of an srun on this machine."""

    def __init__(self, srun: SrunStep) -> None:
        super().__init__(2)
        self.job_id = self.submit(2, step=False)
        self.start_step(self.job_id, srun_host=HOST, srun_pid=srun.pid)
        self.silent_calls = 0
        """So many questions get no answer."""

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        if self.silent_calls:
            self.silent_calls -= 1
            raise AWAY
        return super().steps(job_id)


@pytest.fixture
def srun() -> SrunStep:
    return SrunStep(["sleep", "600"], os.environ, lambda: None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "RETRY_SECONDS", 0.0)


def end(srun: SrunStep, slurm: SlurmWithAStep) -> None:
    end_step(srun, slurm, slurm.job_id, HOST, grace=0.0, at_once=True)


def end_left(srun: SrunStep, slurm: SlurmWithAStep, **words: Any) -> list[str]:
    said: list[str] = []
    options: dict[str, Any] = {"patience": 30.0, "stop": threading.Event(), "say": said.append}
    end_tasks_left(srun, slurm, slurm.job_id, HOST, **(options | words))
    return said


class SlurmThatWaits(SlurmWithAStep):
    """Keeps a step in its books that has lost a node."""

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        return tuple(msgspec.structs.replace(info, tasks=2) for info in super().steps(job_id))

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        self.asked = step


def test_tasks_that_ended_well_are_not_waited_for(
    srun: SrunStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun tells only of those that failed, and the books wait for the dead node."""
    monkeypatch.setattr(step_module, "CANCEL_SECONDS", 600.0)
    slurm = SlurmThatWaits(srun)
    alive, dead = slurm.steps(slurm.job_id)[0].nodes
    srun.reports.take(NodeBegan(0, 0, alive, 2, 2))
    srun.reports.take(NodeBegan(0, 1, dead, 2, 2))
    srun.reports.take(TaskEnd(0, 0, 0, 0))
    end_step(srun, slurm, slurm.job_id, HOST, grace=0.0, at_once=True, dead=(dead,))
    assert slurm.asked and not srun.running
    assert srun.tasks_ended_at is not None


def test_a_step_that_slurm_ended_leaves_nothing(srun: SrunStep) -> None:
    slurm = SlurmWithAStep(srun)
    end(srun, slurm)
    assert not slurm.steps(slurm.job_id)
    assert not srun.running and not srun.may_leave_tasks


class SlurmThatRequeues(SlurmWithAStep):
    """The job is requeued, and runs again, within the grace of its old run's step."""

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        super().cancel_step(job_id, step, signal)
        if signal == "TERM":
            self.start_step(job_id, srun_host=HOST, srun_pid=1)


def test_a_step_of_the_next_run_is_left_alone(srun: SrunStep) -> None:
    """Steps are numbered from 0 in each run of a job. Seen: the supervisor of the old run ended the
    new one 10 s after its start, and the job was lost."""
    slurm = SlurmThatRequeues(srun)
    end_step(srun, slurm, slurm.job_id, HOST, grace=0.0, at_once=False)
    assert [(step.step, step.srun_pid) for step in slurm.steps(slurm.job_id)] == [("0", 1)]
    assert not srun.running


def test_slurm_that_is_away_for_a_moment_is_told_again(srun: SrunStep) -> None:
    slurm = SlurmWithAStep(srun)
    slurm.silent_calls = 1
    end(srun, slurm)
    assert slurm.steps(slurm.job_id), "the step was not to be found, so it was not cancelled"
    assert srun.may_leave_tasks
    slurm.silent_calls = 2
    said = end_left(srun, slurm)
    assert not slurm.steps(slurm.job_id)
    assert len(said) == 1 and "still to be ended" in said[0]
    assert not srun.may_leave_tasks


def test_an_order_that_was_refused_is_given_again(
    srun: SrunStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = SlurmWithAStep(srun)
    slurm.refusals["cancel_step"] = AWAY
    monkeypatch.setattr(step_module, "CANCEL_SECONDS", 0.0)
    end(srun, slurm)
    assert srun.may_leave_tasks
    slurm.refusals.clear()
    end_left(srun, slurm)
    assert not slurm.steps(slurm.job_id)


def test_nothing_follows_while_slurm_does_not_take_the_order(srun: SrunStep) -> None:
    slurm = SlurmWithAStep(srun)
    slurm.unreachable = True
    end(srun, slurm)
    with pytest.raises(SlurmUnreachable):
        end_left(srun, slurm, patience=0.0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(SlurmUnreachable):
        end_left(srun, slurm, stop=stop)
    assert srun.may_leave_tasks


class RequeuedInTheGrace(SlurmWithAStep):
    """Slurm ends the job while its tasks have their grace, and the next run begins."""

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        if signal == "TERM":
            self._enter("cancel_step", job_id, step, signal)
            entry = self._jobs[job_id]
            next_run = StepInfo(job_id, step, entry.job.nodes, srun_host=HOST, srun_pid=1)
            entry.steps = [next_run]
        else:
            super().cancel_step(job_id, step, signal)


def test_the_step_of_the_next_run_is_left_alone(srun: SrunStep) -> None:
    slurm = RequeuedInTheGrace(srun)
    end_step(srun, slurm, slurm.job_id, HOST, grace=0.01, at_once=False)
    assert [step.srun_pid for step in slurm.steps(slurm.job_id)] == [1]
    assert [call for call in slurm.calls if call[0] == "cancel_step"] == [
        ("cancel_step", slurm.job_id, "0", "TERM")
    ]
    assert not srun.running and not srun.may_leave_tasks


def test_an_srun_that_ended_by_itself_left_nothing() -> None:
    ended = threading.Event()
    srun = SrunStep(["sh", "-c", "exit 3"], os.environ, ended.set)
    assert ended.wait(30)
    assert not srun.may_leave_tasks
