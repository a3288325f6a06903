"""Unequal shares of a batch: DDP averages over ranks, the loss is an average over samples."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("sres.training")


class Shares:
    """Weighs each rank's gradients with its share of the batch that it was given last."""

    def __init__(self) -> None:
        self._wrappers: list[nn.parallel.DistributedDataParallel] = []
        self._uneven = False
        self._weighed = False
        self._told = False
        self._weight = 1.0

    def enter(self) -> None:
        """A new world: its wrappers and loaders are made anew."""
        self._wrappers = []
        self._uneven = self._weighed = False
        self._weight = 1.0

    def wrap(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Weigh what this wrapper averages, if shares are unequal."""
        self._wrappers.append(wrapper)
        self._register()

    def expect(self, loader: Any, drop_last: bool) -> None:
        """A loader whose shares may be unequal: in this world, or in its last batch."""
        self._uneven = self._uneven or loader.weight != 1.0 or not drop_last
        self._register()

    def given(self, loader: Any) -> None:
        """The next gradients are of this loader's last share."""
        self._weight = loader.weight

    def committed(self) -> None:
        """Say once that a step was weighed wrongly."""
        if self._weight == 1.0 or self._weighed or self._told or dist.get_rank():
            return
        self._told = True
        log.warning(
            "this rank's share of the batch is %.3g times the mean share, and only s.ddp weighs "
            "that: choose a global batch that the number of ranks divides",
            self._weight,
        )

    def _register(self) -> None:
        if not self._uneven or not self._wrappers:
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def weighted(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            bucket.buffer().mul_(self._weight)
            return allreduce_hook(state, bucket)

        # torch compares annotations with its classes; here they are words.
        weighted.__annotations__.clear()
        for wrapper in self._wrappers:
            wrapper.register_comm_hook(dist.group.WORLD, weighted)
        self._wrappers, self._weighed = [], True
