"""Steps of microbatches, one after the other: the numbers that a world of some size has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_resilience.errors import UsageError
from slurm_resilience.training.data.loader import ReplayLoader
from slurm_resilience.training.data.warn_once import warn_once
from slurm_resilience.training.elastic.gradient_sums import TrainedNets, sums_of
from slurm_resilience.training.elastic.microbatch_step import MicrobatchStep, StepSetting
from slurm_resilience.training.elastic.plan import StepSpan
from slurm_resilience.training.elastic.rates import RatePolicy, check_policy, rate_factor
from slurm_resilience.training.elastic.same_numerics import BufferWatch, compare_ranks

__all__ = ["MicrobatchSteps", "step_length"]


def step_length(
    *, size: int, count: int, per_rank: int, world: int, same_bits: bool, rate: RatePolicy
) -> int:
    """Return the microbatches of a step in this world.

    Raises:
        UsageError: the arguments contradict each other.
    """
    numbers = {"size": size, "count": count, "per_rank": per_rank}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"s.microbatches: {name}={value!r} must be a whole number")
    if size < 1 or bool(count) == bool(per_rank):
        raise UsageError(
            "s.microbatches needs size= (samples of a microbatch) and either count= (microbatches "
            "of a step of all ranks together) or per_rank= (of each rank: the batch changes with "
            "the world)"
        )
    check_policy(rate)
    if per_rank and same_bits:
        raise UsageError(
            "same_bits=True needs count=, the same batch in every world; with per_rank= the batch, "
            "and so the result, changes with the world"
        )
    if count and rate != "constant":
        raise UsageError("rate= is for per_rank=: with count= the batch never changes")
    return count or per_rank * world


class MicrobatchSteps:
    """Makes the steps of one loop in one world.

    Args:
        nets: what is trained.
        loader: gives this rank's microbatches.
        size: samples of a full microbatch.
        length: microbatches of a full step in this world.
        full: microbatches of a full step in the full world.
        together: ranks that hold one copy of the nets together, where the world must not matter.
        group: the ranks that hold the same shard of it; None: all ranks.
        waits: called before this rank waits for others.
        check: called before each microbatch; leaves the step where its world is over.
        asks: called when the program asks a step how far the training is.
    """

    def __init__(
        self,
        nets: Sequence[nn.Module],
        loader: ReplayLoader,
        *,
        size: int,
        length: int,
        full: int,
        same_bits: bool,
        rate: RatePolicy,
        device: torch.device,
        together: int = 1,
        group: dist.ProcessGroup | None = None,
        waits: Callable[[], None],
        check: Callable[[], None] = lambda: None,
        asks: Callable[[], None] = lambda: None,
    ) -> None:
        rank, world = loader.rank, loader.world
        self._loader = loader
        self._nets = TrainedNets(nets)
        self._sums = sums_of(
            self._nets, rank=rank, world=world, same_bits=same_bits, together=together, group=group
        )
        self._buffers: BufferWatch | None = None
        if same_bits:
            compare_ranks(device, world)
            self._buffers = BufferWatch(nets)
        factor = rate_factor(rate, length * size, full * size)
        self._waits = waits
        seed = loader.order.seed
        warn = (lambda text: None) if rank else warn_once()
        self._setting = StepSetting(
            size, seed, rank, world, together, factor, self._before_exchange, check, asks, warn
        )

    def wrap_anew(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Go on with a new wrapper, if it holds one of these nets."""
        self._nets.wrap_anew(wrapper)

    def step(self, first: int, batches: list[Any]) -> MicrobatchStep:
        """Make the step that begins at a microbatch.

        Args:
            first: its global number.
            batches: those of this rank.
        """
        sizes = self._loader.sizes
        self._nets.clear()
        if self._buffers is not None:
            self._buffers.begin()
        return MicrobatchStep(
            StepSpan(first, len(sizes)),
            batches,
            sizes,
            self._loader.order.samples_before(first),
            self._sums,
            self._setting,
        )

    def _before_exchange(self) -> None:
        """Say that this rank waits for others from here on; look at what forward changed."""
        self._waits()
        if self._buffers is not None:
            self._buffers.refuse_changes()
