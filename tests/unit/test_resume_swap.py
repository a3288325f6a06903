"""Nodes for a running job: how it is asked for them, and when no more."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from minutes_pass import MinutesPass

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable
from slurm_resilience.model import Job
from slurm_resilience.resume.allocation import swap
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.decide.classify import Cause
from slurm_resilience.resume.decide.plan import Plan
from slurm_resilience.resume.recovery import Recovery


class Stop(threading.Event):
    """An event that never waits; each wait is kept, and after three times it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        if len(self.waited) == 3:
            self.set()
        return self.is_set()


def allocation(slurm: FakeSlurm, job: int) -> Allocation:
    user_stop = threading.Event()
    return Allocation(slurm, slurm.job(job), user_stop, patience=0.0, permits_expansion=True)


def test_switches_are_asked_for_once_and_where_there_is_a_choice() -> None:
    slurm = FakeSlurm(4)
    slurm.switches = {"n1": "leaf1"}
    ours = allocation(slurm, slurm.submit(4))
    ours.own_nodes = ("n1", "n2", "n3")
    assert ours.facts(3, "").domains == {}
    ours.own_nodes = ("n1", "n2")
    assert ours.facts(2, "").domains == slurm.switches
    slurm.refusals["domains"] = SlurmError("it is asked for once")
    assert ours.facts(2, "").domains == slurm.switches


def test_a_refusal_at_once_is_not_tried_again_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    slurm, stop = FakeSlurm(2), Stop()
    job = slurm.submit(2)
    slurm.refusals["allocate_for"] = SlurmError("Job violates accounting/QOS policy")
    assert swap.grow(allocation(slurm, job), 1, 3600.0, stop, lambda: True) is None
    assert len(slurm.calls) == len(stop.waited) == 3
    assert min(stop.waited) > swap.SALLOC_SECONDS - 1
    said = capfd.readouterr().err
    assert "the others go on" in said and "QOS policy" in said and "3600" not in said


def test_the_reason_of_a_failed_exchange_is_told_though_the_helper_is_not_taken_back() -> None:
    slurm = FakeSlurm(4)
    job = slurm.submit(2)
    slurm.refusals["merge"] = SlurmError("the nodes did not move")
    slurm.refusals["cancel_job"] = SlurmError("no answer")
    with pytest.raises(SlurmError, match="did not move"):
        swap.grow(allocation(slurm, job), 1, 3600.0, Stop())


def test_a_wait_for_slurmctld_is_told_again_and_again(capfd: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm(2)
    job = slurm.job(slurm.submit(2))
    stop, clock = threading.Event(), MinutesPass()
    ours = Allocation(slurm, job, stop, patience=300.0, permits_expansion=True, clock=clock)
    slurm.unreachable = True
    with pytest.raises(SlurmUnreachable):
        ours.refresh()
    assert 4 <= capfd.readouterr().err.count("waiting for slurmctld") <= 6


def test_the_next_life_of_a_requeued_job_is_left_alone() -> None:
    slurm = FakeSlurm(2)
    job = slurm.submit(2)
    ours = allocation(slurm, job)
    slurm.requeue(job)
    slurm.pass_time(300.0)
    slurm.start_now(job)
    slurm.pass_time(10.0)
    assert slurm.job(job).state == "RUNNING"
    assert ours.refresh() == ""
    assert ours.job.restarts == 0
    with pytest.raises(NotFound):
        swap.grow(ours, 1, 3600.0, Stop())


def test_a_node_that_was_lost_and_came_back_counts_as_added() -> None:
    slurm = FakeSlurm(3)
    job = slurm.submit(3)
    ours = allocation(slurm, job)
    slurm.shrink(job, ["n1", "n2"])
    before = slurm.allocate_for

    def allocate(job_now: Job, *more: Any) -> int:
        # It loses another one while it waits, and is given the new machine of that name.
        slurm.shrink(job, ["n1"])
        return before(job_now, *more)

    slurm.allocate_for = allocate  # type: ignore[method-assign, assignment]
    added = swap.grow(ours, 2, 3600.0, Stop())
    assert added == ("n2", "n3")


def test_an_exchange_brings_no_node_that_srun_excludes() -> None:
    wanted: list[tuple[str, ...]] = []

    class Asked(FakeSlurm):
        def allocate_for(
            self, job: Job, nodes: int, wait: float, stop: threading.Event | None = None
        ) -> int:
            wanted.append(job.excluded_nodes)
            return super().allocate_for(job, nodes, wait, stop)

    slurm = Asked(4)
    ours = allocation(slurm, slurm.submit(2))
    ours.excluded = ("n4",)
    swap.grow(ours, 1, 0.0, Stop())
    assert wanted == [("n4",)]


def test_a_node_that_is_silent_is_not_taken_in() -> None:
    """Two nodes lose their power together; Slurm still takes the other one for idle."""
    slurm = FakeSlurm(4)
    ours = allocation(slurm, slurm.submit(2))
    asked: list[tuple[str, ...]] = []

    def doubts(nodes: tuple[str, ...]) -> dict[str, str]:
        asked.append(nodes)
        return {name: "no beat for 2 s" for name in nodes if name == "n3"}

    assert swap.grow(ours, 1, 3600.0, Stop(), doubts=doubts) == ("n4",)
    assert asked == [("n3",), ("n4",)]
    assert slurm.job(ours.id).nodes == ("n1", "n2", "n4")
    assert [job.id for job in slurm.jobs() if job.state == "RUNNING"] == [ours.id]


def test_a_node_that_was_silent_is_taken_once_it_is_back() -> None:
    slurm = FakeSlurm(3)
    ours = allocation(slurm, slurm.submit(2))
    answers = iter([{"n3": "no beat for 2 s"}, {}])

    def doubts(_: tuple[str, ...]) -> dict[str, str]:
        # The helper that is given up leaves its node before the next try.
        slurm.before["allocate_for"] = lambda: slurm.pass_time(10.0)
        return next(answers)

    assert swap.grow(ours, 1, 3600.0, Stop(), doubts=doubts) == ("n3",)


def test_nodes_of_other_steps_are_seen_and_ones_own_are_not() -> None:
    slurm = FakeSlurm(4)
    ours = allocation(slurm, slurm.submit(4, step=False))
    slurm.add_step(ours.id, ("n1", "n2"))
    slurm.add_step(ours.id, ("n3", "n4"))
    assert ours.facts(2, "").busy_nodes == (), "nothing is known of our own step yet"
    ours.own_steps, ours.own_nodes = {"1"}, ("n3", "n4")
    assert ours.facts(2, "").busy_nodes == ("n1", "n2")
    ours.own_nodes = ("n2", "n3")
    assert ours.facts(2, "").busy_nodes == ("n1",), "what it shared before it may share again"
    assert ours.facts(2, "", living_nodes=("n1",)).busy_nodes == ("n2",), "what it lost it may not"


def relaunch_without(slurm: FakeSlurm, ours: Allocation, sick: str) -> None:
    """Carry out a relaunch that leaves a node."""
    context: Any = SimpleNamespace(allocation=ours)
    cause = Cause("node", "marked", (sick,))
    plan = Plan("relaunch", "enough are left", leave=(sick,), nodes=("n2", "n4"))
    assert Recovery(context, 2)._obtain(cause, plan, ("n2", "n3")) is not None


def test_a_node_that_was_left_on_suspicion_does_not_come_back_in_exchange() -> None:
    """No mark keeps Slurm from giving it out again."""
    slurm = FakeSlurm(4)
    ours = allocation(slurm, slurm.submit(3, step=False))
    context: Any = SimpleNamespace(
        allocation=ours,
        limits=SimpleNamespace(swap_wait=0.0),
        link=SimpleNamespace(doubts=lambda _: {}),
    )
    recovery = Recovery(context, 2)
    first = Plan("relaunch", "n2 was the only one to fail", leave=("n2",), nodes=("n1", "n3"))
    assert recovery._obtain(Cause("program", "it crashed", ("n2",)), first, ("n1", "n2", "n3"))
    slurm.set_node(["n3"], state="fail", reason="Action:Replace")
    second = Plan("swap", "1 of 2 nodes to be exchanged", leave=("n3",), take=1)
    obtained = recovery._obtain(Cause("node", "no beat", ("n3",)), second, ("n1", "n3"))
    assert obtained is not None
    assert obtained[0] == ("n1", "n4")


def test_a_relaunch_gives_the_sick_node_back() -> None:
    slurm = FakeSlurm(4)
    ours = allocation(slurm, slurm.submit(4, step=False))
    relaunch_without(slurm, ours, "n3")
    assert ours.nodes == slurm.job(ours.id).nodes == ("n1", "n2", "n4")


def test_a_node_with_another_step_of_the_job_is_kept() -> None:
    slurm = FakeSlurm(4)
    ours = allocation(slurm, slurm.submit(4, step=False))
    slurm.add_step(ours.id, ("n3",))
    relaunch_without(slurm, ours, "n3")
    assert "n3" in slurm.job(ours.id).nodes


def test_the_batch_host_is_kept() -> None:
    slurm = FakeSlurm(4)
    ours = allocation(slurm, slurm.submit(4, step=False))
    host = ours.job.batch_host
    relaunch_without(slurm, ours, host)
    assert host in slurm.job(ours.id).nodes


def test_a_relaunch_does_not_need_slurms_leave(capfd: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm(4)
    ours = allocation(slurm, slurm.submit(4, step=False))
    slurm.refusals["shrink"] = SlurmError("the DB index is being set")
    relaunch_without(slurm, ours, "n3")
    assert "n3 cannot be given back" in capfd.readouterr().err
