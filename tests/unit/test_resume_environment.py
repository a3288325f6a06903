"""Environment: what srun and the tasks of an attempt find."""

from __future__ import annotations

import subprocess

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume.srun.environment import (
    PORT_BASE,
    PORT_SPAN,
    Attempt,
    srun_environment,
    task_variables,
    wrapped,
)

ATTEMPT = Attempt(12, 1, 0, ("n1", "n3"), ("n1", "n3", "n4"), "192.0.2.1", "/shared/.sres/x")
BATCH = {
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_CPUS_PER_NODE": "4(x3)",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_NTASKS": "6",
    "SLURM_CPUS_PER_TASK": "2",
    "HOME": "/home/alice",
}


def test_the_first_attempt_keeps_slurms_own_lists() -> None:
    variables = task_variables(ATTEMPT)
    assert variables["NODE_LIST"] == "n[1,3]"
    assert (variables["MASTER_NODE"], variables["MASTER_ADDR"]) == ("n1", "192.0.2.1")
    assert (variables["NNODES"], variables["NODE_RANK"]) == ("2", "@NODEID")
    assert variables["SRES_TOKEN"] == "12.0.1"
    assert variables["SRES_DIR"] == "/shared/.sres/x"
    assert "SLURM_JOB_NODELIST" not in variables


def test_a_later_attempt_says_which_nodes_the_job_has_now() -> None:
    variables = task_variables(msgspec.structs.replace(ATTEMPT, number=2, directory=""))
    assert variables["SLURM_JOB_NODELIST"] == "n[1,3-4]"
    assert variables["SLURM_JOB_NUM_NODES"] == "3"
    assert "SRES_DIR" not in variables


@given(st.integers(1, 2**31), st.integers(0, 1000), st.integers(1, 1000))
def test_ports_are_below_the_kernels_and_change_with_each_attempt(
    job: int, restarts: int, number: int
) -> None:
    this = msgspec.structs.replace(ATTEMPT, job=job, restarts=restarts, number=number)
    following = msgspec.structs.replace(this, number=number + 1)
    assert PORT_BASE <= this.port < PORT_BASE + PORT_SPAN <= 32768
    assert this.port != following.port
    assert this.token != following.token


def test_an_unchanged_job_leaves_sruns_environment_alone() -> None:
    assert srun_environment(BATCH, ("n1", "n2", "n3"), changed=False) == BATCH


def test_a_swapped_node_shows_in_sruns_environment() -> None:
    now = srun_environment(BATCH, ("n1", "n2", "n4"), changed=True)
    assert now["SLURM_NODELIST"] == now["SLURM_JOB_NODELIST"] == "n[1-2,4]"
    assert now["SLURM_NNODES"] == now["SLURM_JOB_NUM_NODES"] == "3"
    assert "SLURM_STEP_NODELIST" not in now
    assert (now["SLURM_NTASKS"], now["SLURM_CPUS_PER_TASK"]) == ("6", "2")
    assert now["HOME"] == "/home/alice"


def test_a_smaller_job_has_fewer_repetitions() -> None:
    two = srun_environment(BATCH, ("n1", "n2"), changed=True)
    assert (two["SLURM_TASKS_PER_NODE"], two["SLURM_JOB_CPUS_PER_NODE"]) == ("2(x2)", "4(x2)")
    one = srun_environment(BATCH, ("n1",), changed=True)
    assert one["SLURM_TASKS_PER_NODE"] == "2"


def test_nodes_that_were_not_alike_are_not_guessed() -> None:
    uneven = BATCH | {"SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert "SLURM_TASKS_PER_NODE" not in srun_environment(uneven, ("n1", "n4"), changed=True)


def test_what_was_not_set_stays_unset() -> None:
    assert srun_environment({"HOME": "/"}, ("n1",), changed=True) == {"HOME": "/"}


def test_a_wrapped_program_gets_its_words_as_they_are() -> None:
    words = ("printf", "%s|", "a b", "$HOME", "`id`", "'", '"', "")
    argv = wrapped(words, {"A": "x 'y' $z", "NODE_RANK": "@NODEID"})
    program = [*argv[: -len(words)], "sh", "-c", 'printf "%s|" "$A" "$NODE_RANK" "$@"', "x", *words]
    done = subprocess.run(
        program, env={"PATH": "/usr/bin:/bin", "SLURM_NODEID": "3"}, capture_output=True, text=True
    )
    assert done.stdout == "x 'y' $z|3|" + "".join(f"{word}|" for word in words)
