"""A small Llama-style language model: RMSNorm, rotary positions, SwiGLU, causal attention.

For recipes, drills and benchmarks: large enough to be a real training, small enough for a laptop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class LlamaShape:
    """Sizes of a model.

    Args:
        vocabulary: tokens; 256: bytes.
        width: of the residual stream; a multiple of ``2 * heads``.
        layers: blocks.
        heads: attention heads.
        context: tokens that it sees at most.

    Raises:
        ValueError: the width does not divide into heads of even size.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 96,
        layers: int = 3,
        heads: int = 4,
        context: int = 32,
    ) -> None:
        if width % (2 * heads):
            raise ValueError(f"width {width} is not a multiple of 2 x {heads} heads")
        self.vocabulary, self.width, self.layers = vocabulary, width, layers
        self.heads, self.context = heads, context

    @property
    def hidden(self) -> int:
        """Width inside SwiGLU: 8/3 of the model's, so that its three matrices weigh as two of 4x;
        rounded up to a multiple of 16."""
        return -(-8 * self.width // 3 // 16) * 16


def rotary(length: int, size: int, base: float = 10_000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (length, size / 2): pair i turns by p * base^(-2i/size) at p."""
    speeds = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), speeds)
    return angles.cos(), angles.sin()


def turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of x (…, length, size); the halves of the last dimension are the pairs."""
    length = x.shape[-2]
    cosines, sines = cosines[:length].to(x.dtype), sines[:length].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosines - right * sines, left * sines + right * cosines), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        query = turn(split(self.query(x)), cosines, sines)
        key = turn(split(self.key(x)), cosines, sines)
        mixed = functional.scaled_dot_product_attention(
            query, key, split(self.value(x)), is_causal=True
        )
        found: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return found


class LlamaBlock(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a shortcut."""

    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.mlp = Attention(shape), SwiGLU(shape)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x), cosines, sines)
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found


class Llama(nn.Module):
    """The whole model.

    Args:
        shape: its sizes.
        seed: of the weights: the same on every rank, and in every process that replaces one.
        block: makes a layer from the sizes and the layer's number; other models have other ones.
    """

    def __init__(
        self,
        shape: LlamaShape,
        seed: int = 0,
        block: Callable[[LlamaShape, int], nn.Module] = LlamaBlock,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(shape.vocabulary, shape.width)
            self.blocks = nn.ModuleList(block(shape, number) for number in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, std=0.02)
        cosines, sines = rotary(shape.context, shape.width // shape.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) int64 to logits (batch, length, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; logits (batch, length, vocabulary), targets (batch, length)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
