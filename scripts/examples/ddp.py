"""DistributedDataParallel with all that a long training has: schedule, clipping, checkpoints.

    python -m slurm_resilience.launcher --nproc-per-node 2 scripts/examples/ddp.py

One rank may be missing (min_world=1): the others go on at once with its share of the batch, and it
is let in again at a step's end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from slurm_resilience.training import Checkpointer, Session, resilient


class Parity(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Twelve bits, and whether an even number of the first three is set."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        bits = (torch.tensor(index) >> torch.arange(12)) & 1
        return bits.float(), bits[:3].sum() % 2


def build(
    steps: int,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Everything that has to survive."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)


def train(s: Session, steps: int) -> None:
    """Run the block: after a fault it is entered again, and goes on where it was."""
    model, opt, schedule = s.once(build, steps)
    s.track(model=model, opt=opt, schedule=schedule)
    net = s.ddp(model)  # anew: it holds this world's process group
    for x, y in s.loader(Parity(), global_batch=64, steps=steps, epochs=None):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with s.update():
            opt.step()
            schedule.step()
            opt.zero_grad()
        if s.rank == 0:
            print(f"step {s.step} loss {loss.item():.4f} world {s.world}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, help="a directory that all ranks share")
    given = parser.parse_args()
    disk = Checkpointer(given.checkpoints, every=50) if given.checkpoints else None
    resilient(min_world=1, checkpointer=disk)(train)(given.steps)
