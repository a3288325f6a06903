"""Slurm is asked about unknown jobs at a bounded rate."""

from __future__ import annotations

import contextlib

import pytest
from worlds import FakeClock, job

from slurm_resilience.controller import job_lookups
from slurm_resilience.controller.job_lookups import JobLookups
from slurm_resilience.errors import NotFound, NotPermitted, SlurmUnreachable, WireError
from slurm_resilience.model import Job
from slurm_resilience.wire.limits import Rate

ALICE, BOB = 1000, 1001


class Site:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.asked: list[int] = []
        self.jobs = {7: job(7)}
        self.lookups = JobLookups(self.find, self.clock)  # type: ignore[arg-type]

    def find(self, job_id: int) -> Job:
        self.asked.append(job_id)
        if job_id not in self.jobs:
            raise NotFound(f"job {job_id} does not exist")
        return self.jobs[job_id]


@pytest.fixture
def site() -> Site:
    return Site()


def test_an_answer_is_remembered_for_a_few_seconds(site: Site) -> None:
    site.lookups.ask(7, ALICE)
    site.lookups.ask(7, ALICE)
    assert site.lookups.known(7) == site.jobs[7] and site.asked == [7]
    site.clock.pass_time(job_lookups.REMEMBER_SECONDS + 1)
    assert site.lookups.known(7) is None


def test_so_is_a_no(site: Site) -> None:
    site.lookups.ask(8, ALICE)
    site.lookups.ask(8, BOB)
    with pytest.raises(NotPermitted, match="job 8 does not exist or has ended"):
        site.lookups.known(8)
    assert site.asked == [8]
    site.jobs[8] = job(8)
    site.clock.pass_time(job_lookups.REMEMBER_SECONDS + 1)
    site.lookups.ask(8, ALICE)
    assert site.lookups.known(8) == site.jobs[8]


def test_a_slurm_that_does_not_answer_is_no_no(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(job_id: int) -> Job:
        raise SlurmUnreachable("no answer")

    lookups = JobLookups(silent, site.clock)  # type: ignore[arg-type]
    with pytest.raises(SlurmUnreachable):
        lookups.ask(7, ALICE)
    assert lookups.known(7) is None


def test_a_user_who_names_ids_at_random_does_not_use_up_what_another_one_needs(site: Site) -> None:
    """An hour of it."""
    refused = 0
    for number in range(3600):
        site.clock.pass_time(1.0)
        for attempt in range(20):
            try:
                site.lookups.ask(1_000_000 + 20 * number + attempt, ALICE)
            except WireError as error:
                assert "try again" in str(error)
                refused += 1
    assert len(site.asked) <= 3600 * job_lookups.PER_SECOND_OF_USER + job_lookups.AT_ONCE_OF_USER
    assert refused == 3600 * 20 - len(site.asked)
    site.lookups.ask(7, BOB)
    assert site.lookups.known(7)
    assert len(site.lookups._answers) <= job_lookups.MAX_REMEMBERED + 1


def test_many_users_together_ask_no_more_than_slurm_can_bear(site: Site) -> None:
    for uid in range(1000):
        with pytest.raises(WireError) if uid >= job_lookups.AT_ONCE else contextlib.nullcontext():
            site.lookups.ask(uid, uid)
    assert len(site.asked) == job_lookups.AT_ONCE


def test_a_rate_forgets_keys_that_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm_resilience.wire import limits

    monkeypatch.setattr(limits, "MAX_KEYS", 100)
    rate = Rate(1.0, 2.0)
    for key in range(100):
        assert rate.take(key, 0.0)
    assert not rate.take("one more", 1.0)
    assert rate.take("one more", 3.0) and len(rate._left) == 1


def test_a_rate_gives_back_with_time() -> None:
    rate = Rate(2.0, 3.0)
    assert [rate.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [rate.take("a", 0.1 * i) for i in range(1, 11)].count(True) == 2
    assert [rate.take("a", 100.0) for _ in range(4)] == [True, True, True, False]
