"""The environment of each attempt's tasks, and of its srun. Pure.

`$SLURM_JOB_NODELIST` and its relatives go stale when a node of the job was swapped, so they are
rebuilt from what Slurm says now, for srun (which reads them as defaults) and for the tasks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from slurm_resilience.mesh.rank_variables import OF_A_RANK
from slurm_resilience.resume.srun import env_option
from slurm_resilience.resume.srun.env_option import NODEID
from slurm_resilience.slurm.hostlists import fold

PORT_BASE, PORT_SPAN, PORTS_PER_STEP = 20000, 10000, 7
"""MASTER_PORT lies below the kernel's ephemeral ports (32768–60999), and differs between the
steps of a job: two of them may run side by side, and the port of one that ended may be held by a
process that is still dying. `spank/stepd.c` has the same numbers."""
ADDRESSES_BYTES = 64 * 1024
"""For the addresses of nodes in one option of srun, which may have 128 KiB."""

OF_A_STEP = (
    "SRES_TOKEN",
    "SRES_ATTEMPT",
    "SRES_RESTARTS",
    "SRES_STEP",
    "SRES_DIR",
    "SRES_PROGRESS",
    "SRES_NODES",
    "SRES_SIZES",
    "SRES_LENT",
    "SRES_COMPANION_JOB",
)
"""Variables by which a supervisor tells tasks of their step; each task has the first of them."""
BESIDE_TOKEN = (
    "NODE_LIST",
    "MASTER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "NODE_RANK",
    "SLURM_NODE",
)
"""The same, under names that are not ours: where there is no token, the user has set them.
`spank/common.c` has both lists, too."""


class Attempt(msgspec.Struct, frozen=True):
    """One run of the program: the step that was started, and those that join it."""

    job: int
    number: int
    """From 1, over the life of one supervisor."""
    restarts: int
    """Requeues of the job so far."""
    step_nodes: tuple[str, ...]
    """In the order of their node ids: the first one runs rank 0. Those that were planned, until
    Slurm shows the step."""
    job_nodes: tuple[str, ...]
    master_address: str
    directory: str = ""
    """Shared directory with the fence file and the reported progress; empty: there is none."""
    step: int = 0
    """Slurm's number of the attempt's first step; it is known once Slurm shows the step."""
    tasks_per_node: int = 0
    """The same on every node; 0: it is not known."""
    sizes: str = ""
    """MIN:MAX nodes between which it grows and shrinks while it runs; empty: it does not."""
    named_sizes: tuple[int, ...] = ()
    """Nodes that its world may have; empty: any number between."""

    @property
    def token(self) -> str:
        """Names this attempt among all of the job's: an older one is stale."""
        return f"{self.job}.{self.restarts}.{self.number}"

    @property
    def port(self) -> int:
        return PORT_BASE + (self._port_seed + self.step * PORTS_PER_STEP) % PORT_SPAN

    @property
    def port_mark(self) -> str:
        """Stands for the port until Slurm has given the step its number."""
        return f"{env_option.PORT}{self._port_seed}"

    @property
    def _port_seed(self) -> int:
        return (self.job * 101 + self.restarts * 31) % PORT_SPAN


def without_outer_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a call without what an outer step told its task.

    A task may start a step of its own, or submit a job where sbatch has no plugin: the ranks there
    would take its seat, wait for as many others as it has, or meet the ranks of its training.
    """
    outer = {*OF_A_STEP, *BESIDE_TOKEN} if OF_A_STEP[0] in environment else set()
    if OF_A_RANK[0] in environment:
        outer.update(OF_A_RANK)
    return {name: value for name, value in environment.items() if name not in outer}


def step_variables(attempt: Attempt, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the tasks of an attempt's first step.

    What describes the step is a mark: in each task it becomes what Slurm says of that step.

    Args:
        attempt: as it is planned.
        addresses: of the job's nodes, as Slurm has them.
    """
    variables = task_variables(attempt) | {
        "NODE_LIST": env_option.NODELIST,
        "MASTER_NODE": env_option.MASTER_NODE,
        "MASTER_ADDR": env_option.MASTER_ADDR,
        "MASTER_PORT": attempt.port_mark,
        "NNODES": env_option.NNODES,
    }
    left = ADDRESSES_BYTES
    # The most likely first nodes come first: a node without its address is reached by its name.
    for node in dict.fromkeys((*attempt.step_nodes, *attempt.job_nodes)):
        address = addresses.get(node, node)
        if address != node:
            pair = {env_option.ADDRESS + node: address}
            left -= len(env_option.encode(pair)) + 1
            if left < 0:
                break
            variables |= pair
    return variables


def task_variables(attempt: Attempt) -> dict[str, str]:
    """Return the variables for every task, for a step whose nodes Slurm has shown.

    A value `@NODEID` is the task's own node id.
    """
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
    if attempt.sizes:
        variables["SRES_NODES"] = attempt.sizes
    if attempt.named_sizes:
        variables["SRES_SIZES"] = ",".join(map(str, attempt.named_sizes))
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


_FIRST_NODE = (
    "_sres_first= _sres_rest=$SLURM_STEP_NODELIST",
    # n[1-3],m7: up to a bracket or comma; of a bracket its first number; and on behind it.
    "while _sres_part=${_sres_rest%%[[,]*}; _sres_first=$_sres_first$_sres_part; "
    '_sres_rest=${_sres_rest#"$_sres_part"}; [ "${_sres_rest#\\[}" != "$_sres_rest" ]; '
    "do _sres_rest=${_sres_rest#\\[}; _sres_first=$_sres_first${_sres_rest%%[],-]*}; "
    "_sres_rest=${_sres_rest#*]}; done",
)
"""For a shell: the node with node id 0."""
_IN_A_SHELL = {
    NODEID: '"$SLURM_NODEID"',
    env_option.NNODES: '"$SLURM_STEP_NUM_NODES"',
    env_option.NODELIST: '"$SLURM_STEP_NODELIST"',
    env_option.MASTER_NODE: '"$_sres_first"',
    env_option.MASTER_ADDR: '"$_sres_address"',
}
_SHIFTED = rf"(?P<mark>{NODEID}|{env_option.PROCID})\+(?P<before>\d+)"
"""Stands for a number among those of several steps: so many come before this one's."""
_NUMBER_IN_A_SHELL = {NODEID: "SLURM_NODEID", env_option.PROCID: "SLURM_PROCID"}


def wrapped(program: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the program behind a shell that exports the variables: for sites without the plugin.

    The user's words are arguments of that shell, never its text.
    """
    lines: list[str] = []
    if env_option.MASTER_NODE in variables.values():
        lines += [*_FIRST_NODE, _address_of_first(variables)]
    for name, value in variables.items():
        if not name.startswith(env_option.ADDRESS):
            lines.append(f"export {name}={_shell_value(value)}")
    return ("sh", "-c", "; ".join([*lines, 'exec "$@"']), "sres-task", *program)


def _shell_value(value: str) -> str:
    if value.startswith(env_option.PORT):
        seed = int(value.removeprefix(env_option.PORT))
        step = f"SLURM_STEP_ID * {PORTS_PER_STEP}"
        return f'"$(({PORT_BASE} + ({seed} + {step}) % {PORT_SPAN}))"'
    shifted = re.fullmatch(_SHIFTED, value)
    if shifted is not None:
        return f'"$(({_NUMBER_IN_A_SHELL[shifted["mark"]]} + {shifted["before"]}))"'
    return _IN_A_SHELL.get(value) or shlex.quote(value)


def _address_of_first(variables: Mapping[str, str]) -> str:
    addresses = {
        shlex.quote(name.removeprefix(env_option.ADDRESS)): shlex.quote(value)
        for name, value in variables.items()
        if name.startswith(env_option.ADDRESS)
    }
    cases = [f"{node}) _sres_address={address};;" for node, address in addresses.items()]
    return f"case $_sres_first in {' '.join(cases)} *) _sres_address=$_sres_first;; esac"
