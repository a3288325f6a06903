"""The nodes that a step takes of its job, and those that it leaves idle as spares. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_resilience.errors import UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume.srun.command import leading_number, step_nodes, tasks_by_node
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.totals import cut_environment, environment_totals, totals

SPARES = "auto-resume-spares"
MIN_NODES = "auto-resume-min-nodes"
MAX_NODES = "auto-resume-max-nodes"
STEP_NODES = "auto-resume-step-nodes"
SIZES = "auto-resume-sizes"
PARTITION = "auto-resume-partition"
QOS = "auto-resume-qos"
HANGS = "auto-resume-hangs"
PROGRESS = "auto-resume-progress"
OWN_OPTIONS = (
    "auto-resume",
    SPARES,
    MIN_NODES,
    MAX_NODES,
    STEP_NODES,
    SIZES,
    PARTITION,
    QOS,
    HANGS,
    PROGRESS,
)
"""Options that are for the supervisor alone: srun does not get them."""
MOST_NODES = 65_533
"""No Slurm cluster has more (MaxNodeCount)."""
MOST_DIGITS = 20


def leave_spares(
    command: SrunCommand, job: Job, environment: Mapping[str, str]
) -> tuple[SrunCommand, dict[str, str]]:
    """Return srun's command and environment for a step that leaves its spares idle.

    Args:
        command: the user's.
        job: the job that the step runs in.
        environment: the supervisor's own.

    Raises:
        UsageError: the number is none, or no such step fits into the job as it is now.
    """
    spares = number_of_nodes(command, SPARES)
    kept, own_environment = command.without(*OWN_OPTIONS), dict(environment)
    least = leading_number((kept.value("nodes") or "").partition("-")[0])
    if least > len(job.nodes):
        # In a job that has lost nodes, srun waits for them without end, and without a word.
        raise UsageError(
            f"--nodes={least}: job {job.id} has {len(job.nodes)} node(s); write "
            f"-N{len(job.nodes)}, or submit it again"
        )
    if not spares:
        return kept, own_environment
    there = _first_size(kept, job, environment)
    if spares >= there:
        raise UsageError(
            f"--{SPARES}={spares}: job {job.id} has {there} node(s), and one at least has to "
            f"compute; ask sbatch or salloc for the step's nodes and {spares} more"
        )
    if kept.has("nodes") or kept.has("nodelist"):
        size, _ = step_nodes(kept, job, environment)
        if size + spares > there:
            raise UsageError(
                f"--{SPARES}={spares}: the step takes {size} of the {there} nodes of job {job.id}, "
                f"which leaves {there - size}; write -N{there - spares}, or ask sbatch or salloc "
                f"for {size + spares} nodes"
            )
    else:
        size = there - spares
        if not kept.has("ntasks"):
            own_environment |= _cut_to_step(environment, size, there)
        size = min(size, leading_number(kept.value("ntasks")) or size)
    if size > len(job.nodes):
        raise UsageError(
            f"--{SPARES}={spares}: the step takes {size} nodes, and job {job.id} has "
            f"{len(job.nodes)} left; write -N{len(job.nodes)}, or submit it again"
        )
    if not kept.has("nodes") and not (kept.value("distribution") or "").startswith("arbitrary"):
        kept = kept.adding(f"--nodes={size}")
    return kept, own_environment


def _first_size(command: SrunCommand, job: Job, environment: Mapping[str, str]) -> int:
    """Return the nodes that the job began with: an srun before this one may have used a spare."""
    own = command.jobid in (None, environment.get("SLURM_JOB_ID"))
    began_with = leading_number(environment.get("SLURM_JOB_NUM_NODES")) if own else 0
    return max(began_with, len(job.nodes))


def nodes_gone(command: SrunCommand, job: Job, environment: Mapping[str, str]) -> int:
    """Return the number of nodes that a step lacks which takes all of its job: an srun before may
    have lost them; 0: none, or the step says how many it takes.

    Args:
        command: as srun gets it.
        job: the job that the step runs in.
        environment: the supervisor's own.
    """
    there = len(job.nodes)
    tasks = leading_number(command.value("ntasks"))
    says_nodes = any(map(command.has, ("nodes", "nodelist", "nodefile")))
    if says_nodes or 0 < tasks <= there:
        return 0
    return _first_size(command, job, environment) - there


def fewest_nodes(
    command: SrunCommand, placed: SrunCommand, job: Job, environment: Mapping[str, str]
) -> int:
    """Return the number of nodes with which the step may go on; 0: with no fewer than it has.

    Args:
        command: the user's.
        placed: the same as srun gets it.
        job: the job that the step runs in.
        environment: of srun.

    Raises:
        UsageError: the number is none, or the step cannot be cut to fewer nodes.
    """
    fewest = number_of_nodes(command, MIN_NODES)
    size, _ = step_nodes(placed, job, environment)
    if not fewest or fewest == size:
        return 0
    if fewest > size:
        raise UsageError(f"--{MIN_NODES}={fewest}: the step takes {size} node(s) from the start")
    if "-" in (placed.value("nodes") or ""):
        raise UsageError(f"--{MIN_NODES}: write -N with one number of nodes, not a range")
    check_equal_shares(MIN_NODES, placed, environment, size)
    return fewest


def check_equal_shares(
    option: str, command: SrunCommand, environment: Mapping[str, str], nodes: int
) -> None:
    """Check that each node of a step has the same share of it, whatever their number comes to be.

    Args:
        option: for which that is needed.
        command: the srun.
        environment: of it.
        nodes: that the step takes at its start.

    Raises:
        UsageError: it has not.
    """
    if tasks_by_node(command, environment):
        raise UsageError(
            f"--{option}: with --distribution=arbitrary each task has its own node, so the share "
            "of a node is not known"
        )
    for name, total in totals(command, environment):
        if total % nodes:
            raise UsageError(
                f"--{option}: {name}={total} is no multiple of the step's {nodes} nodes, so the "
                "share of a node is not known; write --ntasks-per-node or --gpus-per-node"
            )


def number_of_nodes(command: SrunCommand, name: str) -> int:
    """Return the number that an option of ours gives; 0 where it is not there.

    Raises:
        UsageError: it is none.
    """
    if not command.has(name):
        return 0
    text = command.value(name) or ""
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--{name}={text}: write a number of nodes, 0 for none")
    check_number(name, text)
    return int(text)


def check_number(name: str, text: str) -> None:
    """Check that a Slurm cluster can have so many nodes.

    Args:
        name: the option that gives them.
        text: digits. They are counted first: Python makes no number of more than 4300.

    Raises:
        UsageError: it cannot.
    """
    if len(text) > MOST_DIGITS or int(text) > MOST_NODES:
        shown = text if len(text) <= MOST_DIGITS else f"{text[:MOST_DIGITS]}…"
        raise UsageError(f"--{name}: {shown} nodes: a Slurm cluster has {MOST_NODES} at most")


def _cut_to_step(environment: Mapping[str, str], size: int, there: int) -> dict[str, str]:
    """Return what is left of the job's tasks and GPUs on fewer nodes.

    Raises:
        UsageError: they are not the same on each node, so the user has to say what he wants.
    """
    for name, total in environment_totals(environment):
        if total % there:
            raise UsageError(
                f"--{SPARES}: {name}={total} of the job is no multiple of its {there} nodes, so it "
                "is not known what is left for the step; give srun its own -N and -n"
            )
    return cut_environment(environment, there, size)
