"""The nodes of a job's other supervised sruns, between two of their attempts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from test_resume_swap import allocation

from slurm_resilience.clock import SystemClock
from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume import fence, history
from slurm_resilience.resume.allocation import claims as module
from slurm_resilience.resume.allocation import swap
from slurm_resilience.resume.allocation.claims import NodeClaims
from slurm_resilience.resume.decide.classify import Cause
from slurm_resilience.resume.decide.plan import Plan
from slurm_resilience.resume.recovery import Recovery
from slurm_resilience.resume.srun.host_calls import HostCalls

OWN, OTHER, KILLED = 11, 12, 13
UID = os.geteuid()


def keep(
    base: Path, job: int, supervisor: int, *attempts: tuple[str, ...], restarts: int = 0
) -> None:
    """Keep the attempts of a supervised srun as its supervisor does."""
    folder = Path(fence.open_directory(base, job, supervisor)).parent
    kept = history.AttemptHistory(folder, job, restarts, ["a"], supervisor)
    for number, nodes in enumerate(attempts, 1):
        kept.start(number, nodes, 5.0)


def found(base: Path, restarts: int = 0) -> frozenset[str]:
    sruns = history.other_sruns(base, UID, OWN, (7, restarts), lambda pid: pid != KILLED)
    return frozenset(name for srun in sruns for name in srun.nodes)


def test_the_last_attempt_of_each_living_one_counts(tmp_path: Path) -> None:
    assert found(tmp_path) == frozenset()
    keep(tmp_path, 7, OWN, ("n1", "n2"))
    keep(tmp_path, 7, OTHER, ("n3", "n4"), ("n3", "n5"))
    keep(tmp_path, 7, KILLED, ("n6",))
    keep(tmp_path, 70, OTHER, ("n7",))
    assert found(tmp_path) == {"n3", "n5"}
    assert found(tmp_path, restarts=1) == frozenset()


def test_what_others_plant_is_passed_over(tmp_path: Path) -> None:
    keep(tmp_path, 7, OTHER, ("n3",))
    folder = tmp_path / history.FOLDER / str(UID)
    (folder / "job-7-00000000-14.history").mkdir()
    (folder / "job-7-00000000-15.history").write_text("[")
    os.mkfifo(folder / "job-7-00000000-16.history")
    assert found(tmp_path) == {"n3"}


def test_two_that_lose_a_node_at_once_leave_each_other_s(tmp_path: Path) -> None:
    """Slurm shows a step of neither then: each would take what the other goes on with, though a
    node is idle, and one would wait for the other's end."""
    slurm = FakeSlurm(5)
    ours = allocation(slurm, slurm.submit(4, step=False))
    ours.own_nodes = ("n1", "n3")
    keep(tmp_path, ours.id, OTHER, ("n2", "n4"))
    ours.claims.share(history.AttemptHistory(None, ours.id, 0, ["a"], OWN), Machine(tmp_path, OWN))
    assert ours.facts(2, "").busy_nodes == ("n2", "n4")
    ours.own_nodes = ("n1", "n2")
    assert ours.facts(2, "").busy_nodes == ("n4",), "what they share already stays shared"


class Machine(HostCalls):
    """The machine of several supervised sruns, which are threads here."""

    def __init__(self, base: Path, pid: int) -> None:
        super().__init__()
        self._base, self.pid = base, pid

    def working_directory(self) -> Path:
        return self._base

    def lives(self, pid: int) -> bool:
        return pid in (OWN, OTHER)


def test_two_that_choose_in_one_moment_take_different_spares(tmp_path: Path) -> None:
    slurm = FakeSlurm(6)
    job = slurm.submit(6, step=False)
    begin = threading.Barrier(2)
    chosen: dict[int, Plan] = {}

    def choose(pid: int, nodes: tuple[str, ...], lost: str) -> None:
        folder = Path(fence.open_directory(tmp_path, job, pid)).parent
        kept = history.AttemptHistory(folder, job, 0, [str(pid)], pid)
        kept.start(1, nodes, 5.0)
        ours = allocation(slurm, job)
        ours.own_nodes = nodes
        ours.claims.share(kept, Machine(tmp_path, pid))
        context: Any = SimpleNamespace(
            allocation=ours,
            standard_input=SimpleNamespace(lost=""),
            limits=ResumeSettings(),
            clock=SystemClock(),
        )
        recovery = Recovery(context, 2)
        begin.wait(30)
        chosen[pid] = recovery._choose(Cause("node", "it is dead", (lost,)), (), "", set())

    others = threading.Thread(target=choose, args=(OTHER, ("n3", "n4"), "n4"))
    others.start()
    choose(OWN, ("n1", "n2"), "n2")
    others.join(30)
    taken = {*chosen[OWN].nodes, *chosen[OTHER].nodes}
    assert taken == {"n1", "n3", "n5", "n6"}


def test_a_turn_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Machine(tmp_path, OWN), Machine(tmp_path, OTHER)
    stop = threading.Event()
    claims = NodeClaims((7, 0), SystemClock(), stop)
    claims.share(history.AttemptHistory(None, 7, 0, ["a"], OTHER), second)
    held = first.take_turn(7)
    assert held is not None
    with held:
        assert second.take_turn(7) is None
        monkeypatch.setattr(module, "TURN_SECONDS", 0.05)
        with claims.turn():
            pass
        stop.set()
        monkeypatch.setattr(module, "TURN_SECONDS", 60.0)
        with claims.turn():
            pass
        other_job = second.take_turn(8)
        assert other_job is not None
        with other_job:
            pass
    again = second.take_turn(7)
    assert again is not None
    with again:
        pass


class Claiming:
    """A supervised srun that claims nodes."""

    def __init__(self, base: Path, pid: int, nodes: tuple[str, ...], job: int = 7) -> None:
        folder = Path(fence.open_directory(base, job, pid)).parent
        self.kept = history.AttemptHistory(folder, job, 0, [str(pid)], pid)
        self.kept.start(1, nodes, 5.0)
        self.claims = NodeClaims((job, 0), SystemClock(), threading.Event())
        self.claims.share(self.kept, Machine(base, pid))

    @property
    def claimed(self) -> tuple[str, ...]:
        return self.kept.attempts[-1].next_nodes


def test_of_two_that_claim_a_node_at_once_one_chooses_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read before either wrote: a turn took too long, say."""
    monkeypatch.setattr(module, "YIELD_SECONDS", 0.001)
    said: list[str] = []
    monkeypatch.setattr(module.report, "say", said.append)
    ours, other = Claiming(tmp_path, OWN, ("n1",)), Claiming(tmp_path, OTHER, ("n2",))
    choices = iter(("n5", "n6"))

    def decide() -> tuple[str, tuple[str, ...]]:
        name = next(choices)
        if name == "n5":
            other.claims.add(["n2", "n5"])
        return name, ("n1", name)

    assert ours.claims.choose(decide, ("n1",)) == "n6"
    assert (ours.claimed, other.claimed) == (("n1", "n6"), ("n2", "n5"))
    assert said == ["n5 is taken by another srun of this job: choosing again"]


def test_a_claim_ends_with_the_next_attempt_and_with_its_supervisor(tmp_path: Path) -> None:
    ours = Claiming(tmp_path, OWN, ("n1",))
    killed, other = Claiming(tmp_path, KILLED, ("n7",)), Claiming(tmp_path, OTHER, ("n2",))
    killed.claims.add(["n8"])
    other.claims.add(["n3"])
    assert ours.claims.others() == {"n2", "n3"}
    other.kept.start(2, ("n3",), 9.0)
    assert ours.claims.others() == {"n3"}
    other.kept.remove()
    assert ours.claims.others() == frozenset()


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = history.AttemptHistory(tmp_path / "missing", 7, 0, ["a"], OWN)
    kept.start(1, ("n1",), 5.0)
    claims = NodeClaims((7, 0), SystemClock(), threading.Event())
    claims.share(kept, Machine(tmp_path, OWN))
    assert claims.choose(lambda: ("n2", ("n2",)), ()) == "n2"
    claims.add(["n3"])
    assert kept.attempts[-1].next_nodes == ("n2", "n3")
    assert capfd.readouterr().err.count("the attempts are not kept") == 1


def test_nodes_are_claimed_before_the_job_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another srun of the job would take one that is there for no step to be seen."""
    slurm = FakeSlurm(5)
    ours = allocation(slurm, slurm.submit(4, step=False))
    srun = Claiming(tmp_path, OWN, ("n1", "n3"))
    ours.claims.share(srun.kept, Machine(tmp_path, OWN))
    merge, claimed = slurm.merge, list[tuple[str, ...]]()

    def look(*words: Any) -> Any:
        claimed.append(srun.claimed)
        return merge(*words)

    monkeypatch.setattr(slurm, "merge", look)
    assert swap.grow(ours, 1, 5.0, threading.Event()) == ("n5",)
    assert claimed == [("n5",)]


def test_no_node_is_given_back_that_another_srun_has_got_since(tmp_path: Path) -> None:
    slurm = FakeSlurm(5)
    ours = allocation(slurm, slurm.submit(4, step=False))
    theirs = allocation(slurm, ours.id)
    other = Claiming(tmp_path, OTHER, ("n2", "n4"), ours.id)
    own = Claiming(tmp_path, OWN, ("n1", "n3"), ours.id)
    ours.claims.share(own.kept, Machine(tmp_path, OWN))
    assert swap.grow(theirs, 1, 5.0, threading.Event()) == ("n5",)
    swap.shrink(ours, ["n3"])
    assert slurm.job(ours.id).nodes == ("n1", "n2", "n4", "n5")
    other.claims.add(["n2"])
    swap.shrink(ours, ["n2"])
    assert "n2" in slurm.job(ours.id).nodes, "it goes on with it"
