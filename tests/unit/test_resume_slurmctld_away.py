"""slurmctld is away when a supervised srun needs it: it is waited for, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from minutes_pass import MinutesPass
from supervised_srun import supervisor_of

from slurm_resilience.config import Config, ResumeSettings
from slurm_resilience.errors import NotFound, SlurmUnreachable
from slurm_resilience.resume.call import call_check
from slurm_resilience.resume.call.call_check import _Answers
from slurm_resilience.resume.call.questions import Question

AWAY = "Unable to contact slurm controller (connect failure)"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[MinutesPass]:
    clock = MinutesPass()
    monkeypatch.setattr(call_check, "SYSTEM_CLOCK", clock)
    yield clock


class Slurm:
    """slurmctld, which is away for so many questions."""

    def __init__(self, away: int) -> None:
        self.away, self.asked = away, 0

    def answer(self) -> str:
        self.asked += 1
        if self.asked <= self.away:
            raise SlurmUnreachable(AWAY)
        return "job 7"


def test_a_batch_script_waits_for_slurmctld(
    clock: MinutesPass, capfd: pytest.CaptureFixture[str]
) -> None:
    answers, slurm = _Answers(3600.0), Slurm(away=100)
    assert answers.of(Question(slurm.answer), slurm.answer) == "job 7"
    said = capfd.readouterr().err
    assert f"waiting for slurmctld: {AWAY} (since 1 s, 3600 s at most)" in said
    assert said.count("\n") == 2, "a line each minute"
    before = clock.seconds
    answers.settle()
    assert clock.seconds > before, "in the second of its start it would refuse the step"


def test_a_slurmctld_that_answers_is_not_waited_for(clock: MinutesPass) -> None:
    answers, slurm = _Answers(3600.0), Slurm(away=0)
    assert answers.of(None, slurm.answer) == "job 7"
    answers.settle()
    assert clock.seconds == 0.0


def test_the_wait_has_a_bound(clock: MinutesPass) -> None:
    with pytest.raises(SlurmUnreachable):
        _Answers(3600.0).of(None, Slurm(away=10**6).answer)
    assert clock.seconds == pytest.approx(3600.0, abs=10)


def test_at_a_terminal_the_call_is_refused_at_once(clock: MinutesPass) -> None:
    slurm = Slurm(away=1)
    with pytest.raises(SlurmUnreachable):
        _Answers(0.0).of(Question(slurm.answer), slurm.answer)
    assert (clock.seconds, slurm.asked) == (0.0, 1)


def test_another_answer_is_taken_at_once(clock: MinutesPass) -> None:
    def answer() -> str:
        raise NotFound("Invalid job id specified")

    with pytest.raises(NotFound):
        _Answers(3600.0).of(None, answer)
    assert clock.seconds == 0.0


class UpdatedSlurm(FakeSlurm):
    """slurmctld is away for two minutes, to be updated."""

    def __init__(self, clock: MinutesPass) -> None:
        super().__init__(2)
        self._clock = clock

    def _enter(self, method: str, *arguments: object) -> None:
        self.unreachable = 0.0 < self._clock.seconds < 120.0
        super()._enter(method, *arguments)


def test_who_waits_for_no_idle_node_waits_for_slurmctld_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site has its jobs requeued soon where no node is idle."""
    monkeypatch.chdir(tmp_path)
    clock = MinutesPass()
    slurm = UpdatedSlurm(clock)
    config = Config(resume=ResumeSettings(swap_wait=1.0))
    supervisor = supervisor_of(slurm, slurm.job(slurm.submit(2)), config=config, clock=clock)
    clock.seconds = 1.0
    assert supervisor._allocation.refresh() == "RUNNING"
    assert clock.seconds >= 120.0
    supervisor._clean_up()
