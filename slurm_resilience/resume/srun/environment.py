"""The environment of each attempt's tasks, and of its srun. Pure.

`$SLURM_JOB_NODELIST` and its relatives go stale when a node of the job was swapped, so they are
rebuilt from what Slurm says now, for srun (which reads them as defaults) and for the tasks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from slurm_resilience.resume.srun.env_option import NODEID
from slurm_resilience.slurm.hostlists import fold

PORT_BASE, PORT_SPAN = 20000, 10000
"""MASTER_PORT lies below the kernel's ephemeral ports (32768–60999), and changes with each attempt:
the last one's port may be held by a process that is still dying."""


class Attempt(msgspec.Struct, frozen=True):
    """One run of the program: the step that was started, and those that join it."""

    job: int
    number: int
    """From 1, over the life of one supervisor."""
    restarts: int
    """Requeues of the job so far."""
    step_nodes: tuple[str, ...]
    """In Slurm's order: the first one runs rank 0."""
    job_nodes: tuple[str, ...]
    master_address: str
    directory: str = ""
    """Shared directory with the fence file and the reported progress; empty: there is none."""

    @property
    def token(self) -> str:
        """Names this attempt among all of the job's: an older one is stale."""
        return f"{self.job}.{self.restarts}.{self.number}"

    @property
    def port(self) -> int:
        return PORT_BASE + (self.job * 101 + self.restarts * 31 + self.number * 7) % PORT_SPAN


def task_variables(attempt: Attempt) -> dict[str, str]:
    """Return the variables for every task. A value `@NODEID` is the task's own node id."""
    variables = {
        "NODE_LIST": fold(attempt.step_nodes),
        "MASTER_NODE": attempt.step_nodes[0],
        "MASTER_ADDR": attempt.master_address,
        "MASTER_PORT": str(attempt.port),
        "NNODES": str(len(attempt.step_nodes)),
        "NODE_RANK": NODEID,
        # Not Slurm's: HyperPod's published script asks for it.
        "SLURM_NODE": NODEID,
        "SRES_ATTEMPT": str(attempt.number),
        "SRES_RESTARTS": str(attempt.restarts),
        "SRES_TOKEN": attempt.token,
        "SRES_STEP": "0",
    }
    if attempt.directory:
        variables["SRES_DIR"] = attempt.directory
    if attempt.number > 1:
        variables |= {
            "SLURM_JOB_NODELIST": fold(attempt.job_nodes),
            "SLURM_JOB_NUM_NODES": str(len(attempt.job_nodes)),
        }
    return variables


_NODELISTS = ("SLURM_NODELIST", "SLURM_JOB_NODELIST")
_COUNTS = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_PER_NODE = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
_NEVER = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NODE_ALIASES")


def srun_environment(
    environment: Mapping[str, str], job_nodes: Sequence[str], changed: bool
) -> dict[str, str]:
    """Return the environment of srun itself.

    Args:
        environment: the supervisor's own, as the batch script left it.
        job_nodes: the job's nodes now.
        changed: the job's nodes are no longer those that it started with.
    """
    result = dict(environment)
    if not changed:
        return result
    count = len(job_nodes)
    for name in _NEVER:
        result.pop(name, None)
    for name in _NODELISTS:
        if name in result:
            result[name] = fold(job_nodes)
    for name in _COUNTS:
        if name in result:
            result[name] = str(count)
    for name in _PER_NODE:
        if name in result:
            repeated = _repeat(result[name], count)
            if repeated:
                result[name] = repeated
            else:
                del result[name]
    return result


def _repeat(per_node: str, count: int) -> str:
    """Return ``4(x3)`` for another number of nodes; empty when the nodes were not alike."""
    values = {re.sub(r"\(x\d+\)$", "", part) for part in per_node.split(",")}
    if len(values) != 1:
        return ""
    (value,) = values
    return value if count == 1 else f"{value}(x{count})"


def wrapped(program: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the program behind a shell that exports the variables: for sites without the plugin.

    The user's words are arguments of that shell, never its text.
    """
    exports = []
    for name, value in variables.items():
        text = '"$SLURM_NODEID"' if value == NODEID else shlex.quote(value)
        exports.append(f"export {name}={text}")
    return ("sh", "-c", "; ".join([*exports, 'exec "$@"']), "sres-task", *program)
