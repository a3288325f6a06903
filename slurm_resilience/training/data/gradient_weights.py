"""Weigh unequal shares of a batch: DDP averages over ranks, the loss is an average over samples."""

from __future__ import annotations

import enum
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_resilience.training import compat

log = logging.getLogger("sres.training")

HOOKED = "can only be called once"
"""Words of torch's error when a wrapper has a hook already."""


class Weighing(enum.Enum):
    """State of a world's gradients: UNWEIGHED → WEIGHED or HOOKED, at the first unequal share."""

    UNWEIGHED = "no hook of ours yet"
    WEIGHED = "by our hook"
    HOOKED = "a wrapper has a hook of the user's own"


class GradientWeights:
    """Weighs each rank's gradients with its share of the batch that it was given last."""

    def __init__(self) -> None:
        self._wrappers: list[nn.parallel.DistributedDataParallel] = []
        self.uneven = False
        """Shares are unequal: in this world, or in a last batch."""
        self._weighing = Weighing.UNWEIGHED
        self._told: set[str] = set()
        """Warnings that were given; each comes once."""
        self._weight = 1.0
        self._unequal: set[int] = set()
        """Sizes of the batches since the last update that ranks share unequally; 0: one of equal
        shares. Not their weights, which may be the same on this rank, and others elsewhere."""

    def enter(self) -> None:
        """Begin a new world: its wrappers and loaders are made anew."""
        self._wrappers = []
        self.uneven, self._weighing = False, Weighing.UNWEIGHED
        self._weight = 1.0
        self._unequal.clear()

    def wrap(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Weigh what this wrapper averages, if shares are unequal."""
        self._wrappers.append(wrapper)

    def expect(self, loader: Any, drop_last: bool) -> None:
        """Note a loader whose shares may be unequal: in this world, or in its last batch."""
        self.uneven = self.uneven or loader.weight != 1.0 or not drop_last

    def given(self, loader: Any) -> None:
        """Weigh the next gradients as this loader's last share."""
        self._weight = loader.weight
        self._unequal.add(loader.unequal)
        # Not earlier: a hook of the user's own goes first, and one wrapper bears no two.
        if self.uneven and self._wrappers:
            self._register()

    def committed(self) -> None:
        """Say once that a step was weighed wrongly."""
        mixed = len(self._unequal) > 1 and self._weighing is not Weighing.UNWEIGHED
        self._unequal.clear()
        if mixed and "mixed" not in self._told:
            self._tell_mixed()
        elif self._weight != 1.0 and self._weighing is not Weighing.WEIGHED:
            self._tell_not_weighed()

    def _tell_mixed(self) -> None:
        self._told.add("mixed")
        if dist.get_rank() == 0:
            log.warning(
                "batches of unequal shares fell into one update: gradients that are added up "
                "before they are exchanged (no_sync, or a loss over batches of two loaders) are "
                "weighed wrongly; choose global batches that the number of ranks divides, and "
                "drop_last=True"
            )

    def _tell_not_weighed(self) -> None:
        if "not weighed" in self._told:
            return
        self._told.add("not weighed")
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
                self._weighing = Weighing.HOOKED
        self._wrappers = []
        if self._weighing is Weighing.UNWEIGHED:
            self._weighing = Weighing.WEIGHED
