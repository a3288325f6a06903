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
    stride: int
    """From one of its own to the next: ranks that hold a model together take turns."""
    padding: int
    """Microbatches that it computes once more with weight 0, so that each rank makes the same
    number of collective calls. The others are busy meanwhile: it costs no time."""
    leaves: range
    """Rounds of the whole step that its group computes, numbered from 0: one for each of its first
    calls."""

    @property
    def own(self) -> range:
        """Global numbers of the microbatches that count."""
        return range(self.first, self.first + self.count * self.stride, self.stride)

    @property
    def calls(self) -> list[tuple[int, bool]]:
        """Global number of each microbatch to compute, in order, and whether it counts."""
        last = self.first + max(self.count - 1, 0) * self.stride
        return [(number, True) for number in self.own] + [(last, False)] * self.padding


def plan(step: StepSpan, world: int, together: int = 1) -> tuple[MicrobatchShare, ...]:
    """Give each rank its microbatches.

    In a round each rank of a group computes one microbatch, side by side. Each group has a
    contiguous part of the step's rounds, in the order of the ranks; parts differ by one round at
    most. So the microbatches of a round depend on ``together``, and on nothing else of the world.

    Args:
        together: ranks of a group; 1: each rank is one.

    Raises:
        UsageError: no microbatch, no rank, or groups that do not fill the world.
    """
    if step.count < 1 or world < 1 or together < 1 or world % together:
        raise UsageError(
            f"{step.count} microbatches cannot be shared by {world} ranks in groups of {together}"
        )
    groups, rounds = world // together, -(-step.count // together)
    most = -(-rounds // groups)
    shares = []
    for rank in range(world):
        group, place = divmod(rank, together)
        leaves = range(group * rounds // groups, (group + 1) * rounds // groups)
        # The last round of all may be short.
        count = sum(leaf * together + place < step.count for leaf in leaves)
        first = min(leaves.start * together + place, step.count - 1)
        shares.append(MicrobatchShare(step.first + first, count, together, most - count, leaves))
    return tuple(shares)
