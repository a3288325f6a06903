"""Adapters for fine-tuning (LoRA, arXiv:2106.09685): y = W x + (alpha / rank) B A x, W frozen.

Only A and B train, so only they are healed: the frozen weights are the same in every process that
builds, or loads, the same base model.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import nn

from slurm_resilience.errors import UsageError


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it; at first it changes nothing, for B is 0.

    Args:
        base: the layer; its weights are frozen.
        rank: of the adapter.
        alpha: the adapter counts alpha / rank.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        like = base.weight
        self.a = nn.Parameter(like.new_empty(rank, base.in_features))
        self.b = nn.Parameter(like.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in) to (…, out)."""
        found: torch.Tensor = self.base(x) + self.scale * (x @ self.a.T) @ self.b.T
        return found


def adapt(
    model: nn.Module, rank: int, alpha: float, names: Collection[str], seed: int = 0
) -> list[str]:
    """Freeze a model, and give some of its linear layers an adapter.

    Args:
        model: changed in place.
        rank: of the adapters.
        alpha: see `Adapted`.
        names: last parts of the layers' names, e.g. ``query``.
        seed: of A, which has to be the same on every rank.

    Returns:
        The names of the layers that have one now.

    Raises:
        UsageError: there is no layer of one such name, or no name.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names
    ]
    missing = sorted(set(names) - {name.rpartition(".")[2] for name, _ in found})
    if missing or not found:
        raise UsageError(
            f"no linear layer is called {' or '.join(missing)}"
            if missing
            else "no layer is named that gets an adapter: give its name, as query"
        )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in found:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Adapted(module, rank, alpha))
    return [name for name, _ in found]
