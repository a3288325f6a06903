"""The model and the step that every rank of every benched program runs, under each library."""

from __future__ import annotations

import time

import torch
from torch import nn

STEP_SECONDS = 0.02
_WIDTH = 256


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same model on every rank, and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 8)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    """One forward pass on the batch of this rank and step, after what else a step takes."""
    time.sleep(STEP_SECONDS)
    chance = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(16, 64, generator=chance)
    return net(batch).square().mean()
