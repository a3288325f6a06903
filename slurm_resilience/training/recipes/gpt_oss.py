"""A small GPT-OSS-style block: experts, attention sinks, and a window in every second layer."""

from __future__ import annotations

import torch
from torch import nn

from slurm_resilience.training.recipes.experts import Experts, softmax_gates
from slurm_resilience.training.recipes.llama import LlamaShape, turn

EXPERTS, CHOSEN = 8, 2
SLOPE, LIMIT = 1.702, 7.0
"""The sigmoid's slope in the activation, and the limit of its arguments."""


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Swish of the gate times up + 1, both cut."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(SLOPE * gate) * (up + 1)


class SinkAttention(nn.Module):
    """Causal self-attention, with a learnt score on each head that takes attention from nowhere.

    Args:
        shape: sizes.
        window: tokens that each token sees.
    """

    def __init__(self, shape: LlamaShape, window: int) -> None:
        super().__init__()
        self.heads, self.size, self.window = shape.heads, shape.width // shape.heads, window
        self.shared = max(1, shape.heads // 2)
        """Heads of keys and values."""
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, self.shared * self.size)
        self.value = nn.Linear(shape.width, self.shared * self.size)
        self.out = nn.Linear(shape.width, shape.width)
        self.sinks = nn.Parameter(torch.zeros(shape.heads))

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            heads = y.view(batch, length, -1, self.size).transpose(1, 2)
            return heads.repeat_interleave(self.heads // heads.shape[1], dim=1)

        query = turn(split(self.query(x)), cosines, sines)
        key = turn(split(self.key(x)), cosines, sines)
        scores = query @ key.transpose(-1, -2) * self.size**-0.5
        at = torch.arange(length, device=x.device)
        distance = at[:, None] - at[None, :]
        scores = scores.masked_fill((distance < 0) | (distance >= self.window), float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, length, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        mixed = weights @ split(self.value(x))
        found: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class GptOssBlock(nn.Module):
    """One layer."""

    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        window = shape.context if number % 2 else max(1, shape.context // 4)
        self.attention = SinkAttention(shape, window)
        hidden = max(8, shape.hidden // 4)
        self.mlp = Experts(shape.width, hidden, EXPERTS, CHOSEN, softmax_gates, clamped_swiglu)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x), cosines, sines)
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found
