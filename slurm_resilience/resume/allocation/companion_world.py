"""One world over several allocations: what each srun of it is told, and its tasks. Pure.

The job's own tasks come first, then those of each companion. Slurm counts nodes and tasks anew in
each allocation, so a companion's numbers are shifted behind those before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from slurm_resilience.resume.srun.command import PLACEMENT, tasks_by_node
from slurm_resilience.resume.srun.env_option import NODEID, PROCID
from slurm_resilience.resume.srun.environment import Attempt, srun_environment, task_variables
from slurm_resilience.resume.srun.srun_options import GivenOption, SrunCommand
from slurm_resilience.resume.srun.totals import cut_command, cut_environment, totals
from slurm_resilience.resume.task_labels import TaskNumbers, labels_lines, writes_files
from slurm_resilience.slurm.companion_job import COMPANION_JOB
from slurm_resilience.slurm.hostlists import fold

_ONE_STEP_ONLY = ("multi-prog", "pty", "nodefile", "bcast", "resv-ports")
"""Options that speak of one step's tasks, or of what only one step can have."""
_NO_MPI = (None, "", "none", "openmpi")
"""Values of --mpi by which Slurm itself sets nothing up between the tasks."""
_FILES = ("output", "error", "input")
_FILE_VARIABLES = ("SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_STDINMODE")
_OF_TASK = r"%\d*[tn]"
_OF_JOB = r"%(?P<width>\d*)(?P<letter>[jAJs])"


class WorldPart(msgspec.Struct, frozen=True):
    """The part of a world that one allocation holds."""

    job: int
    nodes: tuple[str, ...]
    first_node: int
    """Nodes in the parts before this one."""


def world_parts(
    job: int, nodes: Sequence[str], companions: Sequence[tuple[int, Sequence[str]]]
) -> tuple[WorldPart, ...]:
    """Return the parts of a world, the main job's first; none where that has all of it.

    Args:
        job: the main job.
        nodes: of the step, in Slurm's order.
        companions: of the main job: id and nodes.
    """
    shares: list[tuple[int, tuple[str, ...]]] = []
    for companion, held in companions:
        shares.append((companion, tuple(name for name in nodes if name in held)))
    shares = [share for share in shares if share[1]]
    elsewhere = {name for _, names in shares for name in names}
    shares.insert(0, (job, tuple(name for name in nodes if name not in elsewhere)))
    parts, first = [], 0
    for number, names in shares:
        parts.append(WorldPart(number, names, first))
        first += len(names)
    return tuple(parts) if len(parts) > 1 else ()


def world_obstacle(
    command: SrunCommand, environment: Mapping[str, str], nodes: int, tasks: int
) -> str:
    """Return why this step cannot be spread over several allocations; empty: it can.

    Args:
        command: the user's.
        environment: of srun.
        nodes: of the step.
        tasks: of the step, as Slurm showed it; 0: it has not.
    """
    for option in _ONE_STEP_ONLY:
        if command.has(option):
            return f"two steps cannot share --{option}"
    if labels_lines(command, environment) and writes_files(command):
        return "srun --label would write the numbers of other tasks into files"
    if command.value("mpi") not in _NO_MPI or environment.get("SLURM_MPI_TYPE") not in _NO_MPI:
        return "two steps cannot be one MPI world (--mpi)"
    if tasks_by_node(command, environment) or environment.get("SLURM_HOSTFILE"):
        return "with --distribution=arbitrary each task has its own node"
    names = [command.value(option) or "" for option in _FILES]
    names += [environment.get(name, "") for name in _FILE_VARIABLES]
    if any(re.search(_OF_TASK, name) for name in names):
        return "files named by %t or %n would be those of other tasks in a second step"
    if (command.value("input") or "").isdecimal():
        return "two steps cannot share the input of one task"
    if not tasks or tasks % nodes:
        return f"its {tasks or 'unknown number of'} tasks do not lie evenly on its {nodes} nodes"
    for name, total in totals(command, environment):
        if total % nodes:
            return f"{name}={total} is no multiple of its {nodes} nodes"
    return ""


def part_command(command: SrunCommand, attempt: Attempt, part: WorldPart) -> SrunCommand:
    """Return the srun of one part, from the user's own line."""
    size = len(attempt.step_nodes)
    cut = cut_command(command.without(*PLACEMENT), size, len(part.nodes)).without("ntasks")
    tasks = attempt.tasks_per_node * len(part.nodes)
    cut = cut.adding(
        f"--nodes={len(part.nodes)}", f"--ntasks={tasks}", f"--nodelist={fold(part.nodes)}"
    )
    if part.job == attempt.job:
        return cut
    named = tuple(_file_of_job(option, attempt) for option in cut.options)
    # Nothing else runs there: what is in Slurm's books is a dead step of ours.
    bare = SrunCommand(named, cut.program).without("jobid", "exclusive", "overlap")
    return bare.adding(f"--jobid={part.job}", "--overlap", "--open-mode=append")


def part_numbers(
    command: SrunCommand, environment: Mapping[str, str], attempt: Attempt, part: WorldPart
) -> TaskNumbers | None:
    """Return the numbers by which the lines of a part are labelled; None: they are not.

    Args:
        command: the user's.
        environment: of srun.
        attempt: as it is planned.
        part: of its world.
    """
    if not labels_lines(command, environment):
        return None
    per_node = attempt.tasks_per_node
    first, count = part.first_node * per_node, len(part.nodes) * per_node
    return TaskNumbers(tuple(range(first, first + count)), len(attempt.step_nodes) * per_node)


def _file_of_job(option: GivenOption, attempt: Attempt) -> GivenOption:
    """Name a file by the main job and its step, which a companion's srun would not do."""
    if option.name not in _FILES or option.value is None:
        return option
    numbers = {"j": f"{attempt.job}", "A": f"{attempt.job}", "s": f"{attempt.step}"}
    numbers["J"] = f"{attempt.job}.{attempt.step}"

    def named(match: re.Match[str]) -> str:
        return numbers[match["letter"]].rjust(int(match["width"] or 0), "0")

    value = re.sub(_OF_JOB, named, option.value)
    return GivenOption(option.name, value, (f"--{option.name}={value}",), option.short)


def part_environment(
    environment: Mapping[str, str], attempt: Attempt, part: WorldPart
) -> dict[str, str]:
    """Return the environment of one part's srun.

    Args:
        environment: the supervisor's own.
        attempt: as it is planned.
        part: of its world.
    """
    own = dict(environment)
    own |= cut_environment(own, len(attempt.step_nodes), len(part.nodes))
    if part.job == attempt.job:
        return own
    held = srun_environment(own, part.nodes, changed=True)
    return held | {"SLURM_JOB_ID": str(part.job), "SLURM_JOBID": str(part.job)}


def world_variables(attempt: Attempt, parts: Sequence[WorldPart]) -> dict[str, str]:
    """Return what every task of the world is told alike."""
    # In the order of the numbers: a hostlist's own order is another.
    nodes = ",".join(fold(part.nodes) for part in parts)
    count, tasks = len(attempt.step_nodes), len(attempt.step_nodes) * attempt.tasks_per_node
    per_node = f"{attempt.tasks_per_node}(x{count})"
    lists = ("NODE_LIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
    counts = ("NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES")
    sizes = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
    return (
        dict.fromkeys(lists, nodes)
        | dict.fromkeys(counts, str(count))
        | dict.fromkeys(sizes, str(tasks))
        | dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node)
    )


def companion_variables(
    attempt: Attempt, parts: Sequence[WorldPart], part: WorldPart
) -> dict[str, str]:
    """Return the variables for the tasks of a companion's part.

    Args:
        attempt: with the step of the main job as Slurm shows it.
        parts: of its world.
        part: the companion's.
    """
    node = f"{NODEID}+{part.first_node}"
    return (
        task_variables(attempt)
        | world_variables(attempt, parts)
        | {
            "NODE_RANK": node,
            "SLURM_NODE": node,
            # Behind the others: without the plugin a shell computes those from these.
            "SLURM_NODEID": node,
            "SLURM_PROCID": f"{PROCID}+{part.first_node * attempt.tasks_per_node}",
            "SLURM_JOB_ID": str(attempt.job),
            "SLURM_JOBID": str(attempt.job),
            "SLURM_STEP_ID": str(attempt.step),
            "SLURM_STEPID": str(attempt.step),
            COMPANION_JOB: str(part.job),
        }
    )
