"""The job's log after seats were filled again."""

from __future__ import annotations

import pytest

from slurm_resilience.resume import report


@pytest.mark.parametrize(
    ("step", "before", "said"),
    [
        (90, 84, "goes on at step 90, from memory"),
        (84, -1, "goes on at step 84, from memory"),
        (0, 84, "goes on at step 0; it had been at step 84"),
        (-1, 84, "goes on; it had been at step 84"),
        (-1, -1, "goes on"),
    ],
)
def test_where_it_goes_on(
    step: int, before: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    seats = report.HealedBlock("n2: dead", "n3 joined", (2, 3), None, 1.0, 2.0, 3.0, step, before)
    report.healed(seats)
    assert f"training      {said}\n" in capfd.readouterr().err
