"""A further attempt neither waits for a dead step nor runs beside a living task."""

from __future__ import annotations

import pytest

from slurm_resilience.resume.first_step import waits_for_the_dead
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
