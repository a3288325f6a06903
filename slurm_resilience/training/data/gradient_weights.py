"""Unequal shares of a batch: DDP averages over ranks, the loss is an average over samples."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_resilience.training import compat

log = logging.getLogger("sres.training")

HOOKED = "can only be called once"
"""Words of torch's error when a wrapper has a hook already."""


class GradientWeights:
    """Weighs each rank's gradients with its share of the batch that it was given last."""

    def __init__(self) -> None:
        self._wrappers: list[nn.parallel.DistributedDataParallel] = []
        self._uneven = False
        self._weighed = False
        self._hooked = False
        self._told = False
        self._told_mixed = False
        self._weight = 1.0
        self._first: float | None = None
        self._mixed = False

    def enter(self) -> None:
        """A new world: its wrappers and loaders are made anew."""
        self._wrappers = []
        self._uneven = self._weighed = self._hooked = False
        self._weight = 1.0
        self._first, self._mixed = None, False

    def wrap(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Weigh what this wrapper averages, if shares are unequal."""
        self._wrappers.append(wrapper)

    def expect(self, loader: Any, drop_last: bool) -> None:
        """A loader whose shares may be unequal: in this world, or in its last batch."""
        self._uneven = self._uneven or loader.weight != 1.0 or not drop_last

    def given(self, loader: Any) -> None:
        """The next gradients are of this loader's last share."""
        weight = self._weight = loader.weight
        if self._first is None:
            self._first = weight
        elif weight != self._first:
            self._mixed = True
        # Not earlier: a hook of the user's own goes first, and one wrapper bears no two.
        if self._uneven and self._wrappers:
            self._register()

    def committed(self) -> None:
        """Say once that a step was weighed wrongly."""
        mixed, self._first, self._mixed = self._mixed, None, False
        if mixed and self._weighed and not self._told_mixed:
            self._tell_mixed()
        elif self._weight != 1.0 and not self._told and (self._hooked or not self._weighed):
            self._tell_not_weighed()

    def _tell_mixed(self) -> None:
        self._told_mixed = True
        if dist.get_rank() == 0:
            log.warning(
                "batches of unequal shares fell into one update: gradients that are added up "
                "before they are exchanged (no_sync) are weighed wrongly; choose a global batch "
                "that the number of ranks divides, and drop_last=True"
            )

    def _tell_not_weighed(self) -> None:
        self._told = True
        if dist.get_rank() == 0:
            log.warning(
                "this rank's share of the batch is %.3g times the mean share, and only s.ddp "
                "without a hook of your own weighs that: choose a global batch that the number of "
                "ranks divides",
                self._weight,
            )

    def _register(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def weighted(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            bucket.buffer().mul_(self._weight)
            return allreduce_hook(state, bucket)

        # torch compares annotations with its classes; here they are words.
        weighted.__annotations__.clear()
        for wrapper in self._wrappers:
            noted = compat.noted_hooks(wrapper)
            hooks = list(noted)
            try:
                wrapper.register_comm_hook(dist.group.WORLD, weighted)
            except RuntimeError as error:
                if HOOKED not in str(error):
                    raise
                # torch has noted ours nevertheless.
                noted[:] = hooks
                self._hooked = True
        self._wrappers, self._weighed = [], True
