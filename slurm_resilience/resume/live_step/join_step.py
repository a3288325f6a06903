"""Join: a living step loses some of its seats, and another step beside it fills them again. Pure.

A training that re-forms its own world need not be stopped when a node dies: its step is started so
that the tasks on the other nodes run on, and a *join step* brings the lost ones back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from slurm_resilience.resume.srun.command import PLACEMENT
from slurm_resilience.resume.srun.srun_options import GivenOption, SrunCommand
from slurm_resilience.slurm.hostlists import fold

ASKED = "SRES_CHECKPOINTLESS"
"""1: the program uses `slurm_resilience.training`; 0: stop it and start it again all the same."""
LAUNCHER = "slurm_resilience.launcher"
_LIVING = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
_WHOLE_STEP = (
    *PLACEMENT,
    "ntasks",
    "ntasks-per-node",
    "tasks-per-node",
    "distribution",
    "contiguous",
    "spread-job",
    "use-min-nodes",
    "no-kill",
    "kill-on-bad-exit",
    "wait",
    "jobid",
    "overlap",
    "exclusive",
    "exact",
    "whole",
    "immediate",
    "input",
    "open-mode",
)
"""Options that speak of the step as a whole: a join step has its own."""


class EmptySeats(msgspec.Struct, frozen=True):
    """One node's part of the training."""

    rank: int
    """NODE_RANK: stays when another node takes the part over."""
    node: str
    seats: tuple[int, ...]


class SeatMap(msgspec.Struct, frozen=True):
    """Who sits where."""

    slots: tuple[EmptySeats, ...]
    seats: int
    """Of the full world."""
    per_task: int
    """Seats that one task of the step fills: 1, or the ranks of a launcher."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(slot.node for slot in self.slots)

    def tasks(self, slot: EmptySeats) -> int:
        """Tasks of the step on one node."""
        return max(1, len(slot.seats) // self.per_task)


def can_live(command: SrunCommand, environment: Mapping[str, str]) -> bool:
    """May this step be started so that it outlives a node?

    Only for programs that say so (see `wants`), and not where the user chose otherwise, or where
    srun's own input and output are more than one step can have.
    """
    if not wants(command, environment) or command.multi_prog or command.has("pty"):
        return False
    if command.value("no-kill") == "off" or command.value("wait") not in (None, "0"):
        return False
    return not command.has("kill-on-bad-exit") or command.value("kill-on-bad-exit") == "0"


def wants(command: SrunCommand, environment: Mapping[str, str]) -> bool:
    """Does the program use the training library? Its launcher is named, or the user says so."""
    said = environment.get(ASKED, "")
    return said == "1" or (said != "0" and LAUNCHER in command.program)


def living(command: SrunCommand) -> SrunCommand:
    """The same step, but the loss of a node or a task does not end it."""
    named = [word.removeprefix("--").partition("=")[0] for word in _LIVING]
    more = (word for word, name in zip(_LIVING, named, strict=True) if not command.has(name))
    return command.adding(*more)


def world(
    nodes: Sequence[str], sits: Mapping[int, str], tasks: int, seats: int = 0
) -> SeatMap | None:
    """Put together who sits where. None: not all have been seen yet.

    Args:
        nodes: the step's, by NODE_RANK.
        sits: node of each seat.
        tasks: of the step; 0: not known.
        seats: of the full world; 0: the ranks do not say.
    """
    if tasks <= 0 or not sits or not set(range(seats)) <= set(sits):
        return None
    slots = tuple(
        EmptySeats(rank, node, tuple(sorted(seat for seat, where in sits.items() if where == node)))
        for rank, node in enumerate(nodes)
    )
    found = sum(len(slot.seats) for slot in slots)
    if not all(slot.seats for slot in slots) or found < tasks or found % tasks:
        return None
    return SeatMap(slots, max(sits) + 1, found // tasks)


def seats_of_tasks(seats: Sequence[int], per_task: int, tasks: Sequence[int]) -> tuple[int, ...]:
    """The seats that some tasks of a step filled.

    Args:
        seats: all of the step, in the order of its tasks.
        per_task: seats a task.
        tasks: their numbers within the step.
    """
    return tuple(seat for task in tasks for seat in seats[task * per_task : (task + 1) * per_task])


def join_command(command: SrunCommand, job: int, world: SeatMap, slot: EmptySeats) -> SrunCommand:
    """The step that brings a slot's seats back, from the user's own srun line.

    Args:
        command: the user's.
        job: job id.
        world: as it was.
        slot: with its new node, and the seats to be filled.
    """
    tasks = world.tasks(slot)
    kept = tuple(_own_file(option, slot, tasks) for option in command.without(*_WHOLE_STEP).options)
    total = command.value("gpus")
    bare = SrunCommand(kept, command.program)
    if total is not None:
        bare = bare.without("gpus")
        share = _share(total, len(world.slots))
        if share:
            bare = bare.adding(f"--gpus={share}")
    return bare.adding(
        f"--jobid={job}",
        "--overlap",
        *_LIVING,
        "--nodes=1",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks}",
        f"--nodelist={slot.node}",
        # Standard input is the first step's; a file that both write is not to be emptied.
        "--input=none",
        "--open-mode=append",
    )


def _own_file(option: GivenOption, slot: EmptySeats, tasks: int) -> GivenOption:
    """Task and node numbers begin anew in each step: a file named by them would be another's."""
    if option.name not in ("output", "error") or option.value is None:
        return option
    name = option.value.replace("%n", str(slot.rank))
    if tasks == 1:
        name = name.replace("%t", str(slot.seats[0]))
    return GivenOption(option.name, name, (f"--{option.name}={name}",), option.short)


def _share(total: str, nodes: int) -> str:
    """One node's part of ``--gpus=[type:]N``; empty where it does not divide."""
    kind, colon, number = total.rpartition(":")
    if not number.isdecimal() or int(number) % nodes:
        return ""
    return f"{kind}{colon}{int(number) // nodes}"


def join_variables(
    first: Mapping[str, str],
    world: SeatMap,
    slot: EmptySeats,
    *,
    job_nodes: Sequence[str],
    master_address: str,
    incarnation: int,
    step: int,
) -> dict[str, str]:
    """What the tasks of a join step find.

    Args:
        first: the variables of the attempt's first step.
        world: as it is now.
        slot: with its new node, and the seats to be filled.
        job_nodes: the job's nodes now.
        master_address: of the node with rank 0.
        incarnation: processes that sat on these seats before.
        step: number of this step among the attempt's.
    """
    variables = dict(first) | {
        # In the order of the ranks: a hostlist's own order is another.
        "NODE_LIST": ",".join(world.nodes),
        "MASTER_NODE": world.nodes[0],
        "MASTER_ADDR": master_address,
        "NODE_RANK": str(slot.rank),
        "SLURM_NODE": str(slot.rank),
        "SLURM_JOB_NODELIST": fold(job_nodes),
        "SLURM_JOB_NUM_NODES": str(len(job_nodes)),
        "SRES_SEATS": str(world.seats),
        "SRES_INCARNATION": str(incarnation),
        "SRES_STEP": str(step),
    }
    if world.per_task == 1:
        variables["SRES_SEATS_HERE"] = ",".join(map(str, slot.seats))
    return variables
