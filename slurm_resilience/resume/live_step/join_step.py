"""A join step: a step beside a living one, that fills seats which were lost. Pure.

A training that re-forms its own world need not be stopped when a node dies: its step is started so
that the tasks on the other nodes run on, and a join step brings the lost ones back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slurm_resilience.resume.decide.transitions import advance
from slurm_resilience.resume.live_step.living_program import KEEP_RUNNING
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatMap
from slurm_resilience.resume.srun.command import PLACEMENT
from slurm_resilience.resume.srun.srun_options import GivenOption, SrunCommand
from slurm_resilience.resume.task_labels import TaskNumbers, labels_lines, writes_files
from slurm_resilience.slurm.hostlists import fold


class JoinState(Enum):
    """The life of a join step."""

    PLANNED = "planned"
    STARTING = "starting"
    """Its srun runs; none of its processes has been seen."""
    CONNECTED = "connected"
    """The training sees its processes; they do not step yet."""
    JOINED = "joined"
    FAILED = "failed"


_S = JoinState
JOIN_TRANSITIONS: dict[JoinState, frozenset[JoinState]] = {
    _S.PLANNED: frozenset({_S.STARTING, _S.FAILED}),
    _S.STARTING: frozenset({_S.CONNECTED, _S.FAILED}),
    _S.CONNECTED: frozenset({_S.JOINED, _S.FAILED}),
    _S.JOINED: frozenset(),
    _S.FAILED: frozenset(),
}


@dataclass(eq=False)
class JoinAttempt:
    """One join step, from its plan until its processes step with the others."""

    step: int
    """Its number among the attempt's steps."""
    loss: int
    """Number of the loss that it mends."""
    seats: tuple[int, ...]
    deadline: float
    """Monotonic: until then it has to reach the next state."""
    state: JoinState = JoinState.PLANNED

    def enter(self, state: JoinState) -> None:
        """Change the state.

        Raises:
            IllegalTransition: `JOIN_TRANSITIONS` does not have the change.
        """
        self.state = advance(JOIN_TRANSITIONS, self.state, state)

    @property
    def pending(self) -> bool:
        """It has neither joined nor failed."""
        return self.state in (_S.PLANNED, _S.STARTING, _S.CONNECTED)


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

_ALL_GPUS = "SLURM_GPUS"
"""By this sbatch and salloc tell srun of their --gpus."""


def join_command(command: SrunCommand, job: int, seat_map: SeatMap, slot: NodeSlot) -> SrunCommand:
    """Return the step that brings a slot's seats back, from the user's own srun line.

    Args:
        command: the user's.
        job: job id.
        seat_map: as it was.
        slot: with its new node, and the seats to be filled.
    """
    tasks = seat_map.tasks(slot)
    kept = tuple(_own_file(option, slot, tasks) for option in command.without(*_WHOLE_STEP).options)
    total = command.value("gpus")
    bare = SrunCommand(kept, command.program)
    if writes_files(command):
        # No label, where the one that srun writes is another task's.
        bare = bare.without("label")
    if total is not None:
        bare = bare.without("gpus")
        share = _share(total, len(seat_map.slots))
        if share:
            bare = bare.adding(f"--gpus={share}")
    return bare.adding(
        f"--jobid={job}",
        "--overlap",
        *KEEP_RUNNING,
        "--nodes=1",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks}",
        f"--nodelist={slot.node}",
        # Standard input is the first step's; a file that both write is not to be emptied.
        "--input=none",
        "--open-mode=append",
    )


def join_environment(environment: Mapping[str, str], seat_map: SeatMap) -> dict[str, str]:
    """Return the environment of a join step's srun: of the GPUs that the job has asked for on all
    nodes together (`sbatch --gpus=N`), it takes one node's part.

    Args:
        environment: of srun, for the step as a whole.
        seat_map: as it was.
    """
    own = dict(environment)
    total = own.pop(_ALL_GPUS, None)
    if total and (share := _share(total, len(seat_map.slots))):
        own[_ALL_GPUS] = share
    return own


def join_numbers(
    command: SrunCommand, environment: Mapping[str, str], seat_map: SeatMap, slot: NodeSlot
) -> TaskNumbers | None:
    """Return the numbers by which the lines of a join step are labelled; None: they are not.

    Args:
        command: the user's.
        environment: of srun.
        seat_map: as it was.
        slot: with the seats to be filled.
    """
    if not labels_lines(command, environment):
        return None
    per_task = seat_map.per_task
    tasks = tuple(seat // per_task for seat in slot.seats[::per_task])
    return TaskNumbers(tasks, max(seat_map.seats // per_task, *(task + 1 for task in tasks)))


def _own_file(option: GivenOption, slot: NodeSlot, tasks: int) -> GivenOption:
    """Give a join step files of its own.

    Task and node numbers begin anew in each step: a file named by them would be another task's.
    """
    if option.name not in ("output", "error") or option.value is None:
        return option
    name = option.value.replace("%n", str(slot.rank))
    if tasks == 1:
        name = name.replace("%t", str(slot.seats[0]))
    return GivenOption(option.name, name, (f"--{option.name}={name}",), option.short)


def _share(total: str, nodes: int) -> str:
    """Return one node's part of ``--gpus=[type:]N``; empty where it does not divide."""
    kind, colon, number = total.rpartition(":")
    if not number.isdecimal() or int(number) % nodes:
        return ""
    return f"{kind}{colon}{int(number) // nodes}"


def join_variables(
    first: Mapping[str, str],
    seat_map: SeatMap,
    slot: NodeSlot,
    *,
    job_nodes: Sequence[str],
    master_address: str,
    incarnation: int,
    step: int,
) -> dict[str, str]:
    """Return the environment of a join step's tasks.

    Args:
        first: the variables of the attempt's first step.
        seat_map: as it is now.
        slot: with its new node, and the seats to be filled.
        job_nodes: the job's nodes now.
        master_address: of the node with rank 0.
        incarnation: processes that sat on these seats before.
        step: number of this step among the attempt's.
    """
    variables = dict(first) | {
        # In the order of the ranks: a hostlist's own order is another.
        "NODE_LIST": ",".join(seat_map.nodes),
        "MASTER_NODE": seat_map.nodes[0],
        "MASTER_ADDR": master_address,
        "NODE_RANK": str(slot.rank),
        "SLURM_NODE": str(slot.rank),
        "SLURM_JOB_NODELIST": fold(job_nodes),
        "SLURM_JOB_NUM_NODES": str(len(job_nodes)),
        "SRES_SEATS": str(seat_map.seats),
        "SRES_INCARNATION": str(incarnation),
        "SRES_STEP": str(step),
    }
    if seat_map.per_task == 1:
        variables["SRES_SEATS_HERE"] = ",".join(map(str, slot.seats))
    return variables
