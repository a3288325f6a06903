"""A mixture of experts: each token goes through few of many small networks.

Every expert computes every token here, and most results are weighed with 0: at this size that costs
less than sorting tokens, and all parameters have gradients in each step, which DDP wants.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Gates = Callable[[torch.Tensor, int], torch.Tensor]
"""Scores (…, experts), and how many are chosen, to weights (…, experts); 0: not chosen."""
Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The gate and the up projection to what goes down."""


def softmax_gates(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    """Softmax over the best ones alone (GPT-OSS)."""
    best, which = scores.topk(chosen, dim=-1)
    return torch.zeros_like(scores).scatter(-1, which, best.softmax(-1))


def sigmoid_gates(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    """Each score by itself through a sigmoid, the best ones divided by their sum (DeepSeek-V3)."""
    best, which = scores.sigmoid().topk(chosen, dim=-1)
    return torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))


class Experts(nn.Module):
    """The experts and their router.

    Args:
        width: of the residual stream.
        hidden: width inside an expert.
        count: experts.
        chosen: of them for each token.
        gates: from scores to weights.
        activation: inside an expert.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        count: int,
        chosen: int,
        gates: Gates,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.chosen, self._gates, self._activation = chosen, gates, activation
        self.router = nn.Linear(width, count, bias=False)
        self.gate = nn.Parameter(torch.empty(count, width, hidden))
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, width) to the same."""
        weights = self._gates(self.router(x), self.chosen)
        gate = torch.einsum("...w,ewh->...eh", x, self.gate)
        up = torch.einsum("...w,ewh->...eh", x, self.up)
        each = torch.einsum("...eh,ehw->...ew", self._activation(gate, up), self.down)
        return torch.einsum("...e,...ew->...w", weights, each)
