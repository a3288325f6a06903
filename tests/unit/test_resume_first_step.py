"""A further attempt neither waits for a dead step nor runs beside a living task."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from minutes_pass import MinutesPass
from supervised_srun import supervisor_of

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.resume.first_step import (
    placed,
    plan_attempt,
    start_first_step,
    waits_for_the_dead,
    with_as_many_tasks,
)
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.stderr_reader import EndedTasks
from slurm_resilience.resume.srun.step import no_living_task
from slurm_resilience.slurm.client import StepInfo

OWN = StepInfo(1, "0", ("n1", "n2"), "n1", 100, 4)
OTHER = StepInfo(1, "1", ("n1",), "n1", 200, 2)
PENDING = StepInfo(1, "TBD", ("n2",), "n1", 300, 2)
BATCH = StepInfo(1, "batch", ("n1",))


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ([], False),
        ([BATCH], False),
        ([OWN], True),
        ([BATCH, OWN], True),
        ([OWN, OTHER], False),
        ([OWN, PENDING], False),
        ([OTHER], False),
    ],
)
def test_only_dead_steps_are_overlapped(there: list[StepInfo], expected: bool) -> None:
    assert waits_for_the_dead(there, [OWN]) is expected


STEP = StepInfo(1, "0", ("n1", "n2", "n3"), "n1", 100, 6)
WITHOUT_DEAD = StepInfo(1, "0", ("n1", "n2"), "n1", 100, 6)
N1 = EndedTasks(("n1",), (0, 1), "Killed")
N2 = EndedTasks(("n2",), (2, 3), "Killed")
BOTH = EndedTasks(("n1", "n2"), (0, 1, 2, 3), "Killed")


@pytest.mark.parametrize(
    ("ended", "info", "dead", "gone"),
    [
        ((), STEP, ("n3",), False),
        ((N1,), STEP, ("n3",), False),
        ((N1, N2), STEP, ("n3",), True),
        ((BOTH,), STEP, ("n3",), True),
        ((BOTH,), WITHOUT_DEAD, ("n3",), True),
        ((N1, N2), STEP, (), False),
        ((N1, EndedTasks(("n2",), (2,), "Killed")), STEP, ("n3",), False),
        ((N1, N1), STEP, ("n2", "n3"), True),
        ((BOTH,), STEP, ("n1", "n2", "n3"), False),
        ((BOTH,), StepInfo(1, "0", ("n1", "n2", "n3"), "n1", 100, 0), ("n3",), False),
    ],
)
def test_every_task_of_a_living_node_has_ended(
    ended: tuple[EndedTasks, ...], info: StepInfo, dead: tuple[str, ...], gone: bool
) -> None:
    assert no_living_task(ended, info, dead) is gone


@pytest.mark.parametrize(
    ("line", "nodes", "words"),
    [
        ("-N2 -w n[1-2]", ("n1", "n3"), ["--nodes=2", "--nodelist=n[1,3]"]),
        ("-n4 -m arbitrary -w n3,n1,n1,n2", ("n1", "n2", "n3"), ["--nodelist=n3,n1,n1,n2"]),
        ("-n4 -m arbitrary -w n3,n1,n1,n2", ("n2", "n3", "n5"), ["--nodelist=n3,n5,n5,n2"]),
        ("-n3 -m arbitrary -w n[3-4],n3", ("n4", "n5"), ["--nodelist=n5,n4,n5"]),
        ("-n2 -m arbitrary -N2 -w n3,n1", ("n1", "n3"), ["--nodelist=n3,n1"]),
        # Its order is in a file, which names nodes that may be gone.
        ("-n2 -m arbitrary -w ./hosts", ("n1", "n3"), ["--nodes=2", "--nodelist=n[1,3]"]),
    ],
)
def test_a_further_attempt_names_its_nodes(
    line: str, nodes: tuple[str, ...], words: list[str]
) -> None:
    command = placed(split([*line.split(), "train"], BUILTIN), nodes, {})
    given = [word for word in command.argv if word.startswith(("--node", "-N", "-w"))]
    assert given == words


def test_a_layout_from_the_environment_counts_too() -> None:
    command = split(["-n2", "-w", "n3,n1", "train"], BUILTIN)
    again = placed(command, ("n1", "n4"), {"SLURM_DISTRIBUTION": "arbitrary"})
    assert "--nodelist=n4,n1" in again.argv and "--nodes=2" not in again.argv


@pytest.mark.parametrize(
    ("line", "environment", "per_node", "added"),
    [
        ("--ntasks-per-node=2", {}, 1, ["--ntasks=2"]),
        ("", {"SLURM_NTASKS_PER_NODE": "2"}, 2, ["--ntasks=4"]),
        ("--ntasks-per-node=2", {}, 0, []),
        ("--ntasks-per-node=2 -n3", {}, 1, ["-n3"]),
        ("--ntasks-per-node=2", {"SLURM_NTASKS": "4"}, 2, []),
        ("", {}, 2, []),
    ],
)
def test_a_further_attempt_has_as_many_tasks(
    line: str, environment: dict[str, str], per_node: int, added: list[str]
) -> None:
    attempt = Attempt(1, 2, 0, ("n1", "n3"), ("n1", "n3"), "n1", tasks_per_node=per_node)
    command = with_as_many_tasks(split([*line.split(), "train"], BUILTIN), environment, attempt)
    given = [word for word in command.argv if word.startswith(("--ntasks=", "-n"))]
    assert given == added


FULL = f"srun cannot be started now: {os.strerror(errno.EAGAIN)}"


class FullMachine:
    """A machine on which so many tries to start an srun fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, tries: int) -> None:
        monkeypatch.chdir(folder)
        self._left, self.clock = tries, MinutesPass()
        slurm = FakeSlurm(2)
        self.supervisor = supervisor_of(
            slurm, slurm.job(slurm.submit(2)), clock=self.clock, has_plugin=False
        )
        self.context = self.supervisor._context
        self.context.host_calls.start_srun = self._srun

    def _srun(self, *_: object, **__: object) -> Any:
        self._left -= 1
        if self._left >= 0:
            raise SlurmUnreachable(FULL)
        return "srun"

    def start(self) -> Any:
        planned = plan_attempt(self.context, 2, 0, ("n1", "n2"), "")
        return start_first_step(self.context, planned, lives=False, again=True)


def test_an_srun_is_started_once_the_machine_starts_programs_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It had ended the job: what an attempt leaves on this node is just being ended."""
    full = FullMachine(monkeypatch, tmp_path, tries=5)
    assert full.start() == "srun"
    assert list(map(str, full.context.user_signals.steps)) == ["srun"]
    assert f"waiting for srun: {FULL} (since 1 s, 3600 s at most)" in capfd.readouterr().err


def test_an_srun_that_never_starts_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = FullMachine(monkeypatch, tmp_path, tries=10**6)
    with pytest.raises(SlurmUnreachable, match="cannot be started now"):
        full.start()
    assert full.clock.seconds == pytest.approx(3600.0, abs=10)


def test_a_person_ends_the_wait_for_an_srun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = FullMachine(monkeypatch, tmp_path, tries=10**6)
    monkeypatch.setattr(full.clock, "wait", lambda stop, _: stop.set() or True)
    assert full.start() is None
