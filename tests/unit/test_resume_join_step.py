"""Join: who node_of_seat where in a living step, and the step that fills lost seats again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume.live_step.join_step import (
    join_command,
    join_environment,
    join_numbers,
    join_variables,
)
from slurm_resilience.resume.live_step.living_program import (
    CHECKPOINTLESS,
    can_live,
    living_command,
    uses_training_library,
)
from slurm_resilience.resume.live_step.seats import (
    NodeSlot,
    SeatMap,
    seat_map,
    seats_of_tasks,
)
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.task_labels import TaskNumbers

LAUNCHED = ["python", "-m", "slurm_resilience.launcher", "--nproc-per-node=2", "train.py"]
BARE = SeatMap((NodeSlot(0, "n1", (0, 1)), NodeSlot(1, "n5", (2, 3))), 4, 1)


def command(*words: str, program: list[str] | None = None) -> Any:
    return split([*words, *(program or ["python", "train.py"])], BUILTIN)


# -- which steps live on ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "said", "wanted"),
    [
        (["python", "train.py"], None, False),
        (["python", "train.py"], "1", True),
        (["python", "train.py"], "0", False),
        (LAUNCHED, None, True),
        (LAUNCHED, "1", True),
        (LAUNCHED, "0", False),
    ],
)
def test_only_programs_that_say_so(program: list[str], said: str | None, wanted: bool) -> None:
    environment = {} if said is None else {CHECKPOINTLESS: said}
    assert uses_training_library(command(program=program), environment) is wanted
    assert can_live(command(program=program), environment) is wanted


@pytest.mark.parametrize(
    "words",
    [
        ["--kill-on-bad-exit"],
        ["-K1"],
        ["--wait=30"],
        ["--no-kill=off"],
        ["--pty"],
        ["--multi-prog"],
    ],
)
def test_the_users_own_choice_stands(words: list[str]) -> None:
    assert uses_training_library(command(*words), {CHECKPOINTLESS: "1"})
    assert not can_live(command(*words), {CHECKPOINTLESS: "1"})


def test_how_it_is_started() -> None:
    line = living_command(command("-N2", "--wait=0"))
    assert can_live(line, {CHECKPOINTLESS: "1"})
    assert line.argv == (
        "-N2",
        "--wait=0",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "python",
        "train.py",
    )
    assert living_command(line) == line


# -- the node of every seat -------------------------------------------------------------------


@given(nodes=st.integers(1, 5), tasks=st.integers(1, 4), ranks=st.integers(1, 4))
def test_everybody_has_a_slot(nodes: int, tasks: int, ranks: int) -> None:
    names = [f"n{i}" for i in range(nodes)]
    a_node = tasks * ranks
    node_of_seat = {seat: names[seat // a_node] for seat in range(nodes * a_node)}
    found = seat_map(names, node_of_seat, nodes * tasks)
    assert found is not None
    assert (found.nodes, found.seats, found.per_task) == (tuple(names), len(node_of_seat), ranks)
    assert sorted(seat for slot in found.slots for seat in slot.seats) == sorted(node_of_seat)
    assert {found.tasks(slot) for slot in found.slots} == {tasks}
    every = range(nodes * tasks)
    assert seats_of_tasks(tuple(node_of_seat), ranks, every) == tuple(node_of_seat)


def test_a_world_that_is_not_complete() -> None:
    assert seat_map(["n1", "n2"], {0: "n1"}, 2) is None
    assert seat_map(["n1", "n2"], {0: "n1", 1: "n2"}, 4) is None
    assert seat_map(["n1", "n2"], {0: "n1", 1: "elsewhere"}, 2) is None
    assert seat_map(["n1", "n2"], {0: "n1", 1: "n2"}, 0) is None, "its tasks are not known"


def test_ranks_of_a_launcher_that_come_one_after_the_other() -> None:
    nodes, all_of_them = ["n1", "n2"], {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    for late in all_of_them:
        node_of_seat = {seat: node for seat, node in all_of_them.items() if seat != late}
        assert seat_map(nodes, node_of_seat, 2, 4) is None
        assert seat_map(nodes, node_of_seat, 2) is None, "not every task has as many"
    found = seat_map(nodes, all_of_them, 2, 4)
    assert found is not None
    assert (found.seats, found.per_task) == (4, 2)


# -- the join step ----------------------------------------------------------------------------


def test_the_join_step_keeps_the_users_options_but_not_the_old_places() -> None:
    line = command(
        "-N2", "-n4", "-w", "n1,n2", "--cpus-per-task=3", "-l", "-Aacct", "--gpus=a100:4"
    )
    joined = join_command(line, 12, BARE, BARE.slots[1])
    for option, value in {
        "nodes": "1",
        "ntasks": "2",
        "nodelist": "n5",
        "jobid": "12",
        "input": "none",
        "cpus-per-task": "3",
        "account": "acct",
        "gpus": "a100:2",
        "kill-on-bad-exit": "0",
    }.items():
        assert joined.value(option) == value, option
    assert joined.has("overlap") and joined.has("label") and joined.has("no-kill")
    assert sum(option.called("nodelist") for option in joined.options) == 1
    assert joined.program == line.program


def test_a_join_steps_lines_are_labelled_as_those_of_the_tasks_that_it_replaces() -> None:
    line, files = command("-l"), command("-l", "-o", "out")
    slot = msgspec.structs.replace(BARE.slots[1], seats=(3,))
    numbers = join_numbers(line, {}, BARE, slot)
    assert numbers is not None and numbers.tasks == (3,)
    assert join_numbers(command("-o", "out"), {}, BARE, slot) is None
    assert not join_command(files, 12, BARE, slot).has("label"), "srun would write another one's"
    launchers = msgspec.structs.replace(BARE, per_task=2)
    numbers = join_numbers(line, {}, launchers, BARE.slots[1])
    assert numbers == TaskNumbers((1,), 2)


def test_a_joiner_writes_into_no_other_ranks_file() -> None:
    line = command("--output=log/%t-%n", "-e", "err-%t")
    one = msgspec.structs.replace(BARE.slots[1], seats=(3,))
    joined = join_command(line, 12, BARE, one)
    assert (joined.value("output"), joined.value("error")) == ("log/3-1", "err-3")
    assert joined.value("open-mode") == "append"


def test_gpus_that_do_not_divide_are_left_to_slurm() -> None:
    assert not join_command(command("--gpus=3"), 12, BARE, BARE.slots[1]).has("gpus")


@pytest.mark.parametrize(("total", "share"), [("4", "2"), ("a100:4", "a100:2"), ("3", None)])
def test_a_node_takes_its_part_of_the_gpus_that_sbatch_was_asked_for(
    total: str, share: str | None
) -> None:
    """srun takes the total from its environment, and one node does not have so many."""
    found = join_environment({"SLURM_GPUS": total, "SLURM_JOB_ID": "12"}, BARE)
    assert found.pop("SLURM_GPUS", None) == share and found == {"SLURM_JOB_ID": "12"}
    assert join_environment({}, BARE) == {}


def variables(shape: SeatMap, slot: NodeSlot) -> dict[str, str]:
    first = {"NODE_RANK": "@NODEID", "SRES_TOKEN": "12.0.1", "SRES_STEP": "0", "NNODES": "2"}
    return join_variables(
        first,
        shape,
        slot,
        job_nodes=("n1", "n5"),
        master_address="192.0.2.1",
        incarnation=1,
        step=3,
    )


def test_what_a_joiner_is_told() -> None:
    told = variables(BARE, BARE.slots[1])
    assert told["SRES_SEATS_HERE"] == "2,3"
    assert (told["SRES_SEATS"], told["SRES_INCARNATION"], told["SRES_STEP"]) == ("4", "1", "3")
    assert (told["NODE_RANK"], told["SLURM_NODE"], told["NNODES"]) == ("1", "1", "2")
    assert (told["NODE_LIST"], told["MASTER_NODE"]) == ("n1,n5", "n1")
    assert told["SRES_TOKEN"] == "12.0.1", "the attempt goes on"


def test_a_launcher_counts_its_ranks_itself() -> None:
    shape = msgspec.structs.replace(BARE, per_task=2)
    told = variables(shape, shape.slots[1])
    assert "SRES_SEATS_HERE" not in told
    assert told["NODE_RANK"] == "1"
    assert join_command(command(), 12, shape, shape.slots[1]).value("ntasks") == "1"
