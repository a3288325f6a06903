"""The srun of a companion whose prolog failed: it waits for tasks that never began."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from supervised_srun import supervisor_of, watch_of

from slurm_resilience.model import Node
from slurm_resilience.resume.allocation import companion
from slurm_resilience.resume.allocation.allocation import PROLOG_ERROR
from slurm_resilience.resume.attempt_watch import AttemptWatch
from slurm_resilience.resume.crash_watch import GatheringStage
from slurm_resilience.resume.decide.task_ends import NodeBegan
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.step_set import StepSet
from slurm_resilience.resume.srun.task_reports import StepReports

WAITS = "echo 'srun: Job step aborted: Waiting up to 32 seconds' >&2; exec sleep 600"


class Part:
    """An attempt with a part in a second allocation, on n3, whose srun waits."""

    def __init__(self) -> None:
        self.slurm = FakeSlurm([Node(name, "IDLE", gres="gpu:2") for name in ("n1", "n2", "n3")])
        self.slurm.submit(2, no_kill=True)
        supervisor = supervisor_of(self.slurm)
        allocation = supervisor._allocation
        got = companion.obtain(allocation, 1, 1.0, ())
        assert got is not None and got.nodes == ("n3",)
        self.job = got.id
        nothing = threading.Event().set
        self.step = SrunStep(["sh", "-c", WAITS], os.environ, nothing, name=f"{got.id}.")
        self.step.reports = StepReports("token,1,address")
        self.main = SrunStep(["sleep", "600"], os.environ, nothing, name="1.")
        steps = StepSet(self.main, expected=2)
        steps.parts.append(self.step)
        self.watch: AttemptWatch = watch_of(supervisor, steps)
        deadline = time.monotonic() + 30
        while not self.step.told_end.aborted:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ends_with_a_failed_prolog(self) -> None:
        self.slurm.cancel_job(self.job)
        self.slurm.pass_time(300.0)
        self.slurm.put(Node("n3", "IDLE", frozenset({"DRAIN"}), reason=PROLOG_ERROR))

    def is_given_up(self) -> bool:
        return self.watch._end_early(lambda: GatheringStage.UNKNOWN) is not None


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Part]:
    monkeypatch.chdir(tmp_path)
    made = Part()
    yield made
    for step in (made.step, made.main):
        step.kill()
        assert step.wait(30)


def test_the_attempt_goes_on_without_it(part: Part) -> None:
    assert not part.is_given_up(), "its companion runs"
    part.ends_with_a_failed_prolog()
    assert part.is_given_up()
    assert not part.step.running and not part.main.running
    assert part.step.may_leave_tasks, "Slurm is told to end what may be there"


def test_tasks_that_have_begun_have_their_time(part: Part) -> None:
    part.step.reports.take(NodeBegan(0, 0, "n3", 1, 1))
    part.ends_with_a_failed_prolog()
    assert not part.is_given_up() and part.step.running


def test_a_companion_that_a_person_ended_has_its_time(part: Part) -> None:
    part.slurm.cancel_job(part.job)
    part.slurm.pass_time(300.0)
    assert not part.is_given_up() and part.step.running
