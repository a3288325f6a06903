"""Divide the microbatches of a step among the ranks. Pure.

A training's data is one sequence of microbatches, numbered from 0 whatever the world is. A step
takes the next few of them, and each rank the contiguous part that is its own. So the number of a
microbatch decides its samples, its random numbers and its weight; the rank that computes it decides
nothing.
"""

from __future__ import annotations

import msgspec

from slurm_resilience.errors import UsageError


class StepSpan(msgspec.Struct, frozen=True):
    """The microbatches of one step of all ranks together."""

    first: int
    """Global number of the first one."""
    count: int


class MicrobatchShare(msgspec.Struct, frozen=True):
    """The part of a step that is one rank's."""

    first: int
    """Global number of its first microbatch; with none of its own, of the one it repeats."""
    count: int
    """Microbatches of its own; 0: there are more ranks than microbatches."""
    padding: int
    """Microbatches that it computes once more with weight 0, so that each rank makes the same
    number of collective calls. The others are busy meanwhile: it costs no time."""

    @property
    def own(self) -> range:
        """Global numbers of the microbatches that count."""
        return range(self.first, self.first + self.count)

    @property
    def calls(self) -> list[tuple[int, bool]]:
        """Global number of each microbatch to compute, in order, and whether it counts."""
        last = self.first + max(self.count, 1) - 1
        return [(number, True) for number in self.own] + [(last, False)] * self.padding


def plan(step: StepSpan, world: int) -> tuple[MicrobatchShare, ...]:
    """Give each rank its microbatches: contiguous parts, in the order of the ranks, that differ by
    one microbatch at most.

    Raises:
        UsageError: no microbatch, or no rank.
    """
    if step.count < 1 or world < 1:
        raise UsageError(f"{step.count} microbatches cannot be shared by {world} ranks")
    rounds = -(-step.count // world)
    shares = []
    for rank in range(world):
        begin, end = rank * step.count // world, (rank + 1) * step.count // world
        shares.append(MicrobatchShare(step.first + begin, end - begin, rounds - (end - begin)))
    return tuple(shares)
