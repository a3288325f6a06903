"""The cheap protection of every step: back to the last committed one without copies of parameters.

Forward and backward change gradients, random states and buffers, but no parameter. So a mark keeps
the random states and those buffers that changed since the mark before, and notes the parameters'
version counters, which tell whether anything changed a parameter after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from slurm_resilience.training.state import flat, rng


class _Buffer:
    """One buffer, and its value at the mark."""

    def __init__(self, owner: dict[str, torch.Tensor | None], key: str) -> None:
        self.owner, self.key = owner, key
        self.seen: torch.Tensor | None = None
        self.version = -1
        self.kept: torch.Tensor | None = None

    def mark(self) -> None:
        now = self.owner[self.key]
        if now is None:
            self.seen = None
            return
        if now is self.seen and now._version == self.version:
            return
        here = flat.local(now)
        if self.kept is not None and self.kept.shape == here.shape and now is self.seen:
            self.kept.copy_(here)
        else:
            self.kept = here.clone()
        self.seen, self.version = now, now._version

    def rollback(self) -> None:
        now = self.owner[self.key]
        if self.seen is None or self.kept is None:
            self.owner[self.key] = None
        elif now is not self.seen or now._version != self.version:
            flat.local(self.seen).copy_(self.kept)
            self.owner[self.key] = self.seen
            self.version = self.seen._version


class Marks:
    """What the modules looked like at the last mark.

    Holds one extra copy of the buffers, none of the parameters. A change through `tensor.data` is
    not counted by torch and stays unseen. Schedulers, gradient scalers and own objects are not
    marked: they belong inside the update.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[Any],
    ) -> None:
        self._modules = list(modules.values())
        self._scalers = scalers
        named = {
            id(parameter): (f"{name}.{path}", parameter)
            for name, module in modules.items()
            for path, parameter in module.named_parameters()
        }
        for optimizer in optimizers:
            for number, parameter in enumerate(
                p for group in optimizer.param_groups for p in group["params"]
            ):
                named.setdefault(id(parameter), (f"optimizer.{number}", parameter))
        self._names = [name for name, _ in named.values()]
        self._parameters = [parameter for _, parameter in named.values()]
        self._buffers = [
            _Buffer(part._buffers, key)
            for module in self._modules
            for part in module.modules()
            for key in part._buffers
        ]
        self._versions: list[int] = []
        self._rng: dict[str, Any] = {}

    def mark(self) -> None:
        """Remember now."""
        self._versions = [parameter._version for parameter in self._parameters]
        for buffer in self._buffers:
            buffer.mark()
        self._rng = rng.read()

    def rollback(self) -> tuple[str, ...]:
        """Go back to the mark. Returns the parameters that something changed since: not empty
        means that the state is dirty."""
        for module in self._modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    # A fault inside forward leaves the gathered parameters in the module.
                    part.reshard()
        for buffer in self._buffers:
            buffer.rollback()
        rng.write(self._rng)
        self.forget_gradients()
        return tuple(
            name
            for name, parameter, version in zip(
                self._names, self._parameters, self._versions, strict=True
            )
            if parameter._version != version
        )

    def forget_gradients(self) -> None:
        """Set all gradients to None, and let gradient scalers forget that they unscaled them."""
        for parameter in self._parameters:
            parameter.grad = None
        for scaler in self._scalers:
            # Otherwise the repeated step's unscale_() says it was called twice.
            getattr(scaler, "_per_optimizer_states", {}).clear()
