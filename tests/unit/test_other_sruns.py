"""The nodes of a job's other supervised sruns, between two of their attempts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_slurm import FakeSlurm
from test_resume_swap import allocation

from slurm_resilience.resume import fence, history
from slurm_resilience.resume.recovery import Recovery

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
