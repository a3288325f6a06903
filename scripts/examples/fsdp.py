"""FSDP2 (`fully_shard`) as HSDP: two copies of the model, each sharded over two ranks.

    python -m slurm_resilience.launcher --nproc-per-node 4 scripts/examples/fsdp.py

A rank that is lost takes its shard along; the other copy's rank of the same position has it too.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from slurm_resilience.training import Session, resilient

SHARD = 2


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Eight numbers, and their squares."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(8, generator=torch.Generator().manual_seed(index))
        return x, x.square()


def build(s: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build anew whenever the block is entered: shards hold this world's process groups."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    )
    mesh = s.mesh()  # (replicate, shard)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


@resilient(replica_size=SHARD)
def train(s: Session, steps: int) -> None:
    """Run the block."""
    model, opt = build(s)
    s.track(model=model, opt=opt)
    for x, y in s.loader(Squares(), global_batch=64, steps=steps, epochs=None):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a collective: before the update
        with s.update():
            opt.step()
            opt.zero_grad()
        if s.rank == 0:
            print(f"step {s.step} loss {loss.item():.5f} world {s.world}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    train(parser.parse_args().steps)
