"""A step that leaves spare nodes idle: how many nodes it takes, and what it asks for."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume.srun.command import AttemptCommand, step_nodes
from slurm_resilience.resume.srun.env_option import NODEID
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.step_size import fewest_nodes, leave_spares, nodes_gone

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


def test_a_step_needs_a_node() -> None:
    command = split(["-x", "n[1-4]", "train"], BUILTIN)
    with pytest.raises(UsageError, match=r"--exclude=n\[1-4\]: it leaves no node of job 7"):
        step_nodes(command, JOB, {})


@pytest.mark.parametrize(
    ("words", "began_with", "gone"),
    [
        ([], "6", 2),
        (["-n6"], "6", 2),
        (["-n4"], "6", 0),
        (["-N4"], "6", 0),
        (["-wn[1-2]"], "6", 0),
        (["-F", "nodes"], "6", 0),
        (["--jobid=8"], "6", 0),
        ([], "4", 0),
        ([], "3", 0),
        ([], "", 0),
    ],
)
def test_a_step_of_the_whole_job_may_lack_nodes_that_it_lost(
    words: list[str], began_with: str, gone: int
) -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": began_with}
    assert nodes_gone(split([*words, "train"], BUILTIN), JOB, environment) == gone


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


def fewest(*words: str, **environment: str) -> int:
    command = split(["--auto-resume-min-nodes=2", *words, "train"], BUILTIN)
    placed, cut = leave_spares(command, JOB, environment)
    return fewest_nodes(command, placed, JOB, cut)


def test_the_fewest_nodes() -> None:
    assert fewest() == fewest("-n8") == fewest("-N3", SLURM_GPUS="9", SLURM_NTASKS="6") == 2
    assert fewest("--auto-resume-spares=1", SLURM_NTASKS="8") == 2
    # With no fewer than it has.
    assert fewest("-N2") == fewest("--auto-resume-spares=2") == 0
    assert fewest("--auto-resume-min-nodes=0", "-n7") == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--auto-resume-min-nodes=x"], "write a number of nodes"),
        (["-N1"], "the step takes 1 node"),
        (["--auto-resume-spares=3"], "the step takes 1 node"),
        (["-n7"], "--ntasks=7 is no multiple of the step's 4 nodes"),
        (["-N3", "-G", "a100:4"], "--gpus=4 is no multiple of the step's 3 nodes"),
        (["-N2-4"], "one number of nodes"),
        (["-marbitrary", "-wn3,n1,n2,n2"], "arbitrary"),
    ],
)
def test_a_step_that_cannot_go_on_with_fewer(words: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        fewest(*words)


def test_on_fewer_nodes_each_has_as_many_tasks_and_gpus() -> None:
    command = split(["-n8", "--gpus=a100:16", "train"], BUILTIN)
    launch = AttemptCommand("srun", has_plugin=True, step_size=4)
    job = {"SLURM_NTASKS": "16", "HOME": "/root"}
    fewer, environment = launch.on_fewer(command, job, 3)
    assert list(fewer.argv) == ["--ntasks=6", "--gpus=a100:12", "train"]
    assert environment == {"SLURM_NTASKS": "12", "HOME": "/root"}
    assert launch.on_fewer(command, job, 4) == (command, job)
    assert AttemptCommand("srun", has_plugin=True).on_fewer(command, job, 3) == (command, job)


def test_a_spare_that_is_used_makes_no_later_step_smaller() -> None:
    """A script's second srun begins where the first one has lost a node."""
    began = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "5"}
    assert left("--auto-resume-spares=1", **began)[0] == ["--nodes=4", "train"]
    assert left("--auto-resume-spares=1", "-N4", **began)[0] == ["-N4", "train"]
    other = began | {"SLURM_JOB_ID": "8"}
    assert left("--auto-resume-spares=1", "--jobid=7", **other)[0][-2:] == ["--nodes=3", "train"]
    with pytest.raises(UsageError, match="the step takes 5 nodes, and job 7 has 4 left"):
        left("--auto-resume-spares=1", **began | {"SLURM_JOB_NUM_NODES": "6"})


def test_a_plugin_that_is_gone_is_done_without(capfd: pytest.CaptureFixture[str]) -> None:
    """Slurm is updated while a job runs, and its next srun would refuse the plugin's options."""
    there = [True, None, False]
    launch = AttemptCommand("srun", has_plugin=True, find_plugin=lambda: there.pop(0))
    launch.look_again()
    assert launch.has_plugin
    launch.look_again()
    assert launch.has_plugin, "an srun that does not tell has not lost it"
    launch.look_again()
    launch.look_again()
    assert not launch.has_plugin
    assert capfd.readouterr().err.count("started without it") == 1
    command = split(["python", "train.py"], BUILTIN)
    words, _ = launch.line(command, {"NODE_RANK": NODEID}, {})
    assert "sh" in words and words[-2:] == ["python", "train.py"]
    assert not any(word.startswith("--sres-env") for word in words)
