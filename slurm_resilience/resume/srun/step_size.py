"""The nodes that a step takes of its job, and those that it leaves idle as spares. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_resilience.errors import UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume.srun.command import leading_number, step_nodes
from slurm_resilience.resume.srun.srun_options import SrunCommand

SPARES = "auto-resume-spares"
OWN_OPTIONS = ("auto-resume", SPARES)
"""Options that are for the supervisor alone: srun does not get them."""
_TOTALS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GPUS")
"""By these sbatch tells srun what it asked for on all nodes of the job."""


def leave_spares(
    command: SrunCommand, job: Job, environment: Mapping[str, str]
) -> tuple[SrunCommand, dict[str, str]]:
    """Return srun's command and environment for a step that leaves its spares idle.

    Args:
        command: the user's.
        job: the job that the step runs in.
        environment: the supervisor's own.

    Raises:
        UsageError: the number is none, or no such step fits into the job.
    """
    spares = _number(command)
    kept, own_environment = command.without(*OWN_OPTIONS), dict(environment)
    if not spares:
        return kept, own_environment
    there = len(job.nodes)
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
            own_environment |= _cut_totals(environment, size, there)
        size = min(size, leading_number(kept.value("ntasks")) or size)
    if not kept.has("nodes") and not (kept.value("distribution") or "").startswith("arbitrary"):
        kept = kept.adding(f"--nodes={size}")
    return kept, own_environment


def _number(command: SrunCommand) -> int:
    if not command.has(SPARES):
        return 0
    text = command.value(SPARES) or ""
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--{SPARES}={text}: write a number of nodes, 0 for none")
    return int(text)


def _cut_totals(environment: Mapping[str, str], size: int, there: int) -> dict[str, str]:
    """Return what is left of the job's tasks and GPUs on fewer nodes.

    Raises:
        UsageError: they are not the same on each node, so the user has to say what he wants.
    """
    cut = {}
    for name in _TOTALS:
        match = re.fullmatch(r"(.*:)?([0-9]{1,9})", environment.get(name, ""))
        if match is None:
            continue
        total = int(match[2])
        if total % there:
            raise UsageError(
                f"--{SPARES}: {name}={total} of the job is no multiple of its {there} nodes, so it "
                "is not known what is left for the step; give srun its own -N and -n"
            )
        cut[name] = f"{match[1] or ''}{total // there * size}"
    return cut
