"""A small DeepSeek-V3-style block: latent attention, a shared expert, a dense first layer.

Left out: the bias that balances the router's load, which is no gradient's work.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from slurm_resilience.training.recipes.experts import Experts, sigmoid_gates
from slurm_resilience.training.recipes.llama import LlamaShape, SwiGLU, turn

EXPERTS, CHOSEN = 8, 2


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Swish of the gate, times up."""
    return functional.silu(gate) * up


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values come from one small latent vector of each token.
    Positions are in a part of their own of queries and keys; that of the keys is shared by all
    heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.size = shape.heads, shape.width // shape.heads
        latent = max(8, shape.width // 4)
        self.query = nn.Linear(shape.width, 2 * shape.width, bias=False)
        """A part without position and one with, of each head."""
        self.latent = nn.Linear(shape.width, latent, bias=False)
        self.latent_norm = nn.RMSNorm(latent)
        self.key = nn.Linear(latent, shape.width, bias=False)
        self.value = nn.Linear(latent, shape.width, bias=False)
        self.position = nn.Linear(shape.width, self.size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        content, placed = split(self.query(x)).chunk(2, dim=-1)
        latent = self.latent_norm(self.latent(x))
        shared = turn(self.position(x).unsqueeze(1), cosines, sines)
        key = torch.cat((split(self.key(latent)), shared.expand(-1, self.heads, -1, -1)), dim=-1)
        query = torch.cat((content, turn(placed, cosines, sines)), dim=-1)
        mixed = functional.scaled_dot_product_attention(
            query, key, split(self.value(latent)), is_causal=True
        )
        found: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class SharedExperts(nn.Module):
    """Experts beside one that every token goes through."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        hidden = max(8, shape.hidden // 4)
        self.routed = Experts(shape.width, hidden, EXPERTS, CHOSEN, sigmoid_gates, swiglu)
        self.shared = SwiGLU(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, width) to the same."""
        found: torch.Tensor = self.routed(x) + self.shared(x)
        return found


class DeepSeekBlock(nn.Module):
    """One layer."""

    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = LatentAttention(shape)
        self.mlp = SharedExperts(shape) if number else SwiGLU(shape)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x), cosines, sines)
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found
