"""A plain training loop that goes on when a process dies.

    python -m slurm_resilience.launcher --nproc-per-node 2 scripts/examples/plain.py
    kill -9 one of the two while it runs

No wrapper around the model: the gradients are averaged by hand.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from slurm_resilience.training import Session, resilient


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same on every rank: healing then has nothing to send at the start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


class Sums(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sixteen numbers, and the sine of their sum."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin()


@resilient()
def train(s: Session, steps: int) -> None:
    model, opt = s.once(build)
    s.track(model=model, opt=opt)  # after a fault: from a peer's memory
    for x, y in s.loader(Sums(), global_batch=64, steps=steps, epochs=None):
        loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= s.world
        with s.update():  # the only place where the state changes
            opt.step()
            opt.zero_grad()
        if s.rank == 0:
            print(f"step {s.step} loss {loss.item():.4f} process {os.getpid()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    train(parser.parse_args().steps)
