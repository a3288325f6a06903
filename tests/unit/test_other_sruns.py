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
from slurm_resilience.resume import recovery as module
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
    return history.nodes_of_others(base, UID, OWN, (7, restarts), lambda pid: pid != KILLED)


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
    machine = SimpleNamespace(
        working_directory=lambda: tmp_path, uid=UID, pid=OWN, lives=lambda pid: pid == OTHER
    )
    context: Any = SimpleNamespace(
        allocation=ours, host_calls=machine, standard_input=SimpleNamespace(lost="")
    )
    recovery = Recovery(context, 2)
    assert recovery._facts("").busy_nodes == ("n2", "n4")
    ours.own_nodes = ("n1", "n2")
    assert recovery._facts("").busy_nodes == ("n4",), "what they share already stays shared"


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
        context: Any = SimpleNamespace(
            allocation=ours,
            host_calls=Machine(tmp_path, pid),
            standard_input=SimpleNamespace(lost=""),
            limits=ResumeSettings(),
            clock=SystemClock(),
        )
        recovery = Recovery(context, 2, takes=kept.takes)
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
    context: Any = SimpleNamespace(
        allocation=SimpleNamespace(id=7, user_stop=threading.Event()),
        host_calls=second,
        clock=SystemClock(),
    )
    held = first.take_turn(7)
    assert held is not None
    with held:
        assert second.take_turn(7) is None
        monkeypatch.setattr(module, "TURN_SECONDS", 0.05)
        with Recovery(context, 2)._turn():
            pass
        context.allocation.user_stop.set()
        monkeypatch.setattr(module, "TURN_SECONDS", 60.0)
        with Recovery(context, 2)._turn():
            pass
        other_job = second.take_turn(8)
        assert other_job is not None
        with other_job:
            pass
    again = second.take_turn(7)
    assert again is not None
    with again:
        pass
