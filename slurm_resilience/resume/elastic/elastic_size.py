"""The sizes between which a step grows and shrinks, as its srun asks for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

import msgspec

from slurm_resilience.config import ElasticSettings
from slurm_resilience.errors import UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume.live_step.living_program import LAUNCHER, can_live
from slurm_resilience.resume.srun.command import step_nodes
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.step_size import (
    MAX_NODES,
    PARTITION,
    QOS,
    SIZES,
    STEP_NODES,
    check_equal_shares,
    check_number,
    number_of_nodes,
)

MOST_GROUPS = 1000
"""Requests for nodes of one step: more would be a slip of the pen."""


class ElasticSize(msgspec.Struct, frozen=True):
    """All that an elastic step may become."""

    least: int
    """Nodes with which it may go on."""
    core: int
    """Nodes of the job itself."""
    groups: tuple[int, ...]
    """Nodes of each companion that is asked for."""
    sizes: tuple[int, ...]
    """Numbers of nodes that the world may have, the smallest first; empty: any."""
    settings: ElasticSettings
    """With the partition and the QOS of companions."""

    @property
    def in_order(self) -> bool:
        """A group comes after those before it, and goes before them."""
        return bool(self.sizes)

    @property
    def most(self) -> int:
        return self.core + sum(self.groups)

    @property
    def reached(self) -> tuple[int, ...]:
        """Return the numbers of nodes that it has as one group after the other comes."""
        return tuple(accumulate(self.groups, initial=self.core))

    def ranks(self, group: int) -> range:
        """Return the node ranks of a group, which come behind those of the groups before it."""
        first = self.core + sum(self.groups[:group])
        return range(first, first + self.groups[group])


def elastic_size(
    command: SrunCommand,
    placed: SrunCommand,
    job: Job,
    environment: Mapping[str, str],
    min_nodes: int,
    settings: ElasticSettings,
) -> ElasticSize | None:
    """Return the sizes that srun's options ask for; None: the step keeps its size.

    Args:
        command: the user's.
        placed: the same as srun gets it.
        job: the job that the step runs in.
        environment: of srun.
        min_nodes: with which the step may go on; 0: with no fewer than it begins with.
        settings: of the site.

    Raises:
        UsageError: no step can have these sizes, or its program cannot change its size.
    """
    core, _ = step_nodes(placed, job, environment)
    least = min_nodes or core
    sizes = _sizes(command, core)
    most = number_of_nodes(command, MAX_NODES)
    if not most and not sizes:
        for option in (STEP_NODES, PARTITION, QOS):
            if command.has(option):
                raise UsageError(f"--{option} is for a step that grows: add --{MAX_NODES}=N")
        return None
    if sizes:
        if command.has(STEP_NODES) or (most and most != max(sizes)):
            raise UsageError(f"--{SIZES} names all sizes: leave out --{MAX_NODES}, --{STEP_NODES}")
        above = [size for size in sizes if size >= core]
        groups = tuple(after - before for before, after in pairwise(above))
    else:
        groups = _groups(core, most, number_of_nodes(command, STEP_NODES) or 1)
    if not groups:
        return None
    if not can_live(placed, environment):
        raise UsageError(
            f"--{MAX_NODES}: only a program that uses slurm_resilience.training can change its "
            f"size while it runs: start it by {LAUNCHER}, or write export SRES_CHECKPOINTLESS=1"
        )
    check_equal_shares(MAX_NODES, placed, environment, core)
    changed = {
        name: value
        for name, option in (("partition", PARTITION), ("qos", QOS))
        if (value := command.value(option))
    }
    chosen = msgspec.structs.replace(settings, **changed)
    return ElasticSize(least, core, groups, sizes, chosen)


def _groups(core: int, most: int, step: int) -> tuple[int, ...]:
    if most < core:
        raise UsageError(f"--{MAX_NODES}={most}: the step takes {core} node(s) from the start")
    if (most - core) % step:
        raise UsageError(
            f"--{STEP_NODES}={step}: from {core} node(s) in steps of {step}, {most} is not reached"
        )
    if (most - core) // step > MOST_GROUPS:
        raise UsageError(
            f"--{MAX_NODES}={most}: that is more than {MOST_GROUPS} requests for {step} node(s); "
            f"have it grow by more at once with --{STEP_NODES}=N"
        )
    return (step,) * ((most - core) // step)


def _sizes(command: SrunCommand, core: int) -> tuple[int, ...]:
    """Return the sizes that were named, the smallest first."""
    text = command.value(SIZES) or ""
    if not command.has(SIZES):
        return ()
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and word.strip("0") for word in words):
        raise UsageError(f"--{SIZES}={text}: write numbers of nodes, such as 2,4,8")
    for word in words:
        check_number(SIZES, word)
    sizes = sorted({int(word) for word in words})
    if core not in sizes:
        raise UsageError(
            f"--{SIZES}={text}: the step takes {core} node(s) from the start, which must be one of "
            "them"
        )
    return tuple(sizes)
