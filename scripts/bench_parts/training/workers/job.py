"""The model and the step that every rank of every benched program runs, under each library."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

STEP_SECONDS = 0.02
_WIDTH = 256
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
_GPU_WIDTH, _GPU_LAYERS, _GPU_BATCH = 4096, 6, 1024
"""Some 100 million parameters."""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same model on every rank, and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if DEVICE != "cpu":
        layers = [
            layer
            for _ in range(_GPU_LAYERS)
            for layer in (nn.Linear(_GPU_WIDTH, _GPU_WIDTH), nn.ReLU())
        ]
        large = nn.Sequential(*layers).to(DEVICE)
        return large, torch.optim.AdamW(large.parameters(), lr=1e-3)
    model = nn.Sequential(
        nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 8)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    """One forward pass on the batch of this rank and step, after what else a step takes. A GPU has
    enough to do by itself."""
    if DEVICE != "cpu":
        large = torch.randn(_GPU_BATCH, _GPU_WIDTH, device=DEVICE)
        return net(large).square().mean()
    time.sleep(STEP_SECONDS)
    chance = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(16, 64, generator=chance)
    return net(batch).square().mean()
