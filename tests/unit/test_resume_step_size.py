"""A step that leaves spare nodes idle: how many nodes it takes, and what it asks for."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.step_size import leave_spares

JOB = Job(7, 0, "RUNNING", nodes=("n1", "n2", "n3", "n4"), exclusive=True)


def left(*words: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    command, cut = leave_spares(split([*words, "train"], BUILTIN), JOB, environment)
    return list(command.argv), cut


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["--auto-resume=1"], ["train"]),
        (["--auto-resume=1", "--auto-resume-spares=0"], ["train"]),
        (["--auto-resume=1", "--auto-resume-spares=1"], ["--nodes=3", "train"]),
        (["--auto-resume-spares", "2"], ["--nodes=2", "train"]),
        (["--auto-resume-spares=1", "-n2"], ["-n2", "--nodes=2", "train"]),
        (["--auto-resume-spares=1", "-n8"], ["-n8", "--nodes=3", "train"]),
        (["--auto-resume-spares=1", "-N3"], ["-N3", "train"]),
        (["--auto-resume-spares=1", "-N2-3"], ["-N2-3", "train"]),
        (["--auto-resume-spares=2", "-wn[2-3]"], ["-wn[2-3]", "--nodes=2", "train"]),
        (
            ["--auto-resume-spares=1", "-marbitrary", "-wn3,n1,n1"],
            ["-marbitrary", "-wn3,n1,n1", "train"],
        ),
    ],
)
def test_the_step_takes_the_other_nodes(words: list[str], argv: list[str]) -> None:
    assert left(*words)[0] == argv


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--auto-resume-spares=many"], "write a number of nodes"),
        (["--auto-resume-spares="], "write a number of nodes"),
        (["--auto-resume-spares=-1"], "write a number of nodes"),
        (["--auto-resume-spares=4"], r"4 node\(s\), and one at least has to compute"),
        (["--auto-resume-spares=1", "-N4"], r"takes 4 of the 4 nodes .* write -N3"),
        (["--auto-resume-spares=2", "-wn[1-3]"], r"leaves 1; write -N2, .* for 5 nodes"),
    ],
)
def test_bad_input_gets_one_line(words: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as refusal:
        left(*words)
    assert "\n" not in str(refusal.value)


def test_what_was_asked_for_all_nodes_is_cut() -> None:
    job = {"SLURM_NTASKS": "16", "SLURM_NPROCS": "16", "SLURM_GPUS": "a100:32", "HOME": "/root"}
    cut = {"SLURM_NTASKS": "12", "SLURM_NPROCS": "12", "SLURM_GPUS": "a100:24", "HOME": "/root"}
    assert left("--auto-resume-spares=1", **job)[1] == cut
    # His own words count.
    assert left("--auto-resume-spares=1", "-n8", **job)[1] == job
    assert left("--auto-resume-spares=1", "-N2", **job)[1] == job
    assert left(**job)[1] == job
    with pytest.raises(UsageError, match=r"SLURM_NTASKS=7 .* give srun its own -N and -n"):
        left("--auto-resume-spares=1", SLURM_NTASKS="7")
