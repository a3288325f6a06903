"""A rank's variables are its own: no other step of its job may take its seat."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.rank_variables import RANK_STEP
from slurm_resilience.training.rank_environment import note_step, read_environment

RANK = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SRES_DIR": "/shared/x",
    "SRES_SEAT": "1",
    "SRES_SEATS": "4",
}


def noted(**more: str) -> dict[str, str]:
    """Return the environment of what a rank starts, with more beside it."""
    environment = dict(RANK)
    note_step(environment, read_environment(environment).meet)
    return environment | more


@pytest.mark.parametrize(
    "seat",
    [
        {},
        {"SRES_SEAT": "", "SRES_SEATS": "", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    ],
    ids=["the rank's own", "Slurm's"],
)
def test_an_srun_within_a_rank_takes_no_seat_of_its_training(seat: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"step 12\.5 .* within a rank of step 12\.3"):
        read_environment(noted(SLURM_STEP_ID="5", **seat))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"SLURM_STEP_ID": "5", "SRES_MEET": "dir:/shared/y"},
        {"SLURM_STEP_ID": "5", "SRES_DIR": "/shared/y"},
        {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "13"},
        {"SLURM_STEP_ID": ""},
    ],
    ids=["same step", "a place of its own", "supervised", "another job", "no step"],
)
def test_what_else_a_rank_starts_is_read_as_before(more: dict[str, str]) -> None:
    assert read_environment(noted(**more)).seat == 1


def test_each_srun_without_a_directory_meets_in_a_place_of_its_own() -> None:
    plain = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    environment = dict(plain)
    note_step(environment, read_environment(environment).meet)
    assert read_environment(environment | {"SLURM_STEP_ID": "4"}).meet.endswith("12.0.4")


def test_a_rank_without_others_starts_another_one_by_srun() -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}
    note_step(environment, read_environment(environment).meet)
    inner = environment | {"SLURM_STEP_ID": "4"}
    assert read_environment(inner).meet == "alone"


def test_outside_of_slurm_nothing_is_noted() -> None:
    environment = {"SRES_MEET": "dir:/x"}
    note_step(environment, "dir:/x")
    assert RANK_STEP not in environment
