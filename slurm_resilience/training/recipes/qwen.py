"""A small Qwen3-style block: grouped queries, and a norm on each head's query and key."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from slurm_resilience.training.recipes.llama import LlamaShape, SwiGLU, turn


class QwenAttention(nn.Module):
    """Causal self-attention in which two heads share a key and a value."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.size = shape.heads, shape.width // shape.heads
        self.shared = max(1, shape.heads // 2)
        """Heads of keys and values."""
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, self.shared * self.size, bias=False)
        self.value = nn.Linear(shape.width, self.shared * self.size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, -1, self.size).transpose(1, 2)

        def repeat(y: torch.Tensor) -> torch.Tensor:
            return y.repeat_interleave(self.heads // self.shared, dim=1)

        query = turn(self.query_norm(split(self.query(x))), cosines, sines)
        key = turn(self.key_norm(split(self.key(x))), cosines, sines)
        mixed = functional.scaled_dot_product_attention(
            query, repeat(key), repeat(split(self.value(x))), is_causal=True
        )
        found: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class QwenBlock(nn.Module):
    """One layer."""

    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.mlp = QwenAttention(shape), SwiGLU(shape)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x), cosines, sines)
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found
