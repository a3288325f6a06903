"""Environment: what srun and the tasks of an attempt find."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.launcher.flags import SeatSpan
from slurm_resilience.launcher.node_rank import NodeRank
from slurm_resilience.launcher.processes.child_environment import NodeSeats, of_rank
from slurm_resilience.mesh.rank_variables import LENT, OF_A_RANK
from slurm_resilience.resume.live_step.join_step import join_variables
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatMap
from slurm_resilience.resume.progress.step_report import VARIABLE as STEPS_VARIABLE
from slurm_resilience.resume.srun.command import AttemptCommand
from slurm_resilience.resume.srun.env_option import NODEID, encode
from slurm_resilience.resume.srun.environment import (
    BESIDE_TOKEN,
    OF_A_STEP,
    PORT_BASE,
    PORT_SPAN,
    Attempt,
    srun_environment,
    step_variables,
    task_variables,
    without_outer_step,
    wrapped,
)
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.slurm.companion_job import COMPANION_JOB

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


def test_what_a_task_is_told_stays_out_of_other_jobs() -> None:
    """sbatch and salloc, called by a task, forget it, and so does a supervisor."""
    source = (Path(__file__).parents[2] / "spank" / "common.c").read_text(encoding="utf-8")
    lists = {
        name: tuple(re.findall(r'"(\w+)"', names))
        for name, names in re.findall(r"\*const (\w+)\[\] = \{(.*?)\}", source, re.DOTALL)
    }
    ours = {"of_a_step": OF_A_STEP, "beside_token": BESIDE_TOKEN, "of_a_rank": OF_A_RANK}
    assert lists == ours
    elastic = msgspec.structs.replace(ATTEMPT, sizes="2:4", named_sizes=(2, 4))
    slot = NodeSlot(1, "n3", (1,))
    seat_map = SeatMap((NodeSlot(0, "n1", (0,)), slot), 2, 1)
    joined = join_variables(
        task_variables(elastic),
        seat_map,
        slot,
        job_nodes=("n1", "n3"),
        master_address="192.0.2.1",
        incarnation=1,
        step=1,
    )
    node = NodeSeats(NodeRank(1, SeatSpan(1, 2), "12"), 1, "dir:x", "n3", "s", "k")
    rank = of_rank({}, node, 0, 0)
    told = joined | rank | {LENT: "1", COMPANION_JOB: "13", STEPS_VARIABLE: "x"}
    left = without_outer_step(told | {"HOME": "/home/alice", "SRES_MESH": "speakers"})
    assert {name for name in left if name.startswith(("SRES_", "MASTER_"))} == {"SRES_MESH"}
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK"} & set(left)
    own = {"SRES_MEET": "dir:x", "SRES_DIR": "x", "NNODES": "3", "MASTER_ADDR": "x", "RANK": "0"}
    assert without_outer_step(own) == own, "the user's own"


@pytest.mark.parametrize("has_plugin", [True, False])
@pytest.mark.parametrize(
    ("options", "environment", "exports"),
    [
        ((), {}, None),
        (("--export=ALL,A=1",), {}, "ALL,A=1"),
        (("--export=NONE",), {}, "SRES_PROGRESS"),
        (("--export=PATH,A=x",), {}, "PATH,A=x,SRES_PROGRESS"),
        ((), {"SLURM_EXPORT_ENV": "NONE"}, "SRES_PROGRESS"),
    ],
)
def test_no_other_user_sees_where_steps_are_told(
    has_plugin: bool, options: tuple[str, ...], environment: dict[str, str], exports: str | None
) -> None:
    """Each user may read a command line; with the token another's step could be ended."""
    launch = AttemptCommand("srun", has_plugin)
    command = SrunCommand((), ("./train",)).adding(*options)
    told = {STEPS_VARIABLE: "192.0.2.1 4711 s3cret", "NODE_RANK": NODEID}
    words, own = launch.line(command, told, environment)
    assert "s3cret" not in str(words) and own[STEPS_VARIABLE] == told[STEPS_VARIABLE]
    assert [w.partition("=")[2] for w in words if w.startswith("--export")] == [
        *([exports] if exports else [])
    ]


def test_what_describes_the_step_is_left_to_the_step() -> None:
    """The plan gives the tasks nothing but the addresses of nodes: Slurm may choose others."""
    variables = step_variables(ATTEMPT, {"n1": "192.0.2.1", "n3": "n3", "n4": "192.0.2.4"})
    assert {name: value for name, value in variables.items() if value.startswith("@")} == {
        "NODE_LIST": "@NODELIST",
        "MASTER_NODE": "@MASTER_NODE",
        "MASTER_ADDR": "@MASTER_ADDR",
        "MASTER_PORT": "@PORT.1212",
        "NNODES": "@NNODES",
        "NODE_RANK": "@NODEID",
        "SLURM_NODE": "@NODEID",
    }
    addresses = {name: value for name, value in variables.items() if name.startswith("@")}
    assert addresses == {"@n1": "192.0.2.1", "@n4": "192.0.2.4"}


def test_the_addresses_of_a_large_job_fit_into_one_option() -> None:
    nodes = tuple(f"compute-node-{number:05}" for number in range(10_000))
    large = msgspec.structs.replace(ATTEMPT, step_nodes=nodes[5000:], job_nodes=nodes)
    variables = step_variables(large, dict.fromkeys(nodes, "2001:db8::1234:5678"))
    assert f"@{nodes[5000]}" in variables
    assert len(encode(variables)) < 128 * 1024 - 4096


def test_a_later_attempt_says_which_nodes_the_job_has_now() -> None:
    variables = task_variables(msgspec.structs.replace(ATTEMPT, number=2, directory=""))
    assert variables["SLURM_JOB_NODELIST"] == "n[1,3-4]"
    assert variables["SLURM_JOB_NUM_NODES"] == "3"
    assert "SRES_DIR" not in variables


@given(st.integers(1, 2**31), st.integers(0, 1000), st.integers(0, 9998))
def test_ports_are_below_the_kernels_and_differ_between_the_steps_of_a_job(
    job: int, restarts: int, number: int
) -> None:
    this = msgspec.structs.replace(ATTEMPT, job=job, restarts=restarts, step=number)
    for later in (number + 1, 9999):
        following = msgspec.structs.replace(this, step=later)
        assert PORT_BASE <= this.port < PORT_BASE + PORT_SPAN <= 32768
        assert this.port != following.port


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


FIRST_NODES = {
    "n1": "n1",
    "n[1-3],m7": "n1",
    "n[01,5]": "n01",
    "a-b[03]": "a-b03",
    "a,n[1-2]": "a",
    "n[1-2]x[3-4],z": "n1x3",
    "gpu-[4-5]-ib": "gpu-4-ib",
    "n3,n1": "n3",
}


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("node_list", FIRST_NODES)
def test_a_wrapped_program_is_told_of_its_own_step(shell: str, node_list: str) -> None:
    """Without the plugin a shell finds the same values as `spank/step_view.c`."""
    attempt = msgspec.structs.replace(ATTEMPT, step=3, job_nodes=("n1", "n-1", "a"))
    variables = step_variables(attempt, {"n1": "192.0.2.1", "n-1": "x", "a": "it's"})
    first = FIRST_NODES[node_list]
    address = {"n1": "192.0.2.1", "a": "it's"}.get(first, first)
    environment = {
        "PATH": "/usr/bin:/bin",
        "SLURM_STEP_NODELIST": node_list,
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_ID": "3",
        "SLURM_NODEID": "1",
    }
    names = ["NODE_LIST", "MASTER_NODE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK"]
    argv = wrapped(("sh", "-c", "".join(f'echo "${name}";' for name in names)), variables)
    done = subprocess.run([shell, *argv[1:]], env=environment, capture_output=True, text=True)
    expected = [node_list, first, address, str(attempt.port), "4", "1"]
    assert done.stdout.splitlines() == expected, done.stderr
