"""FSDP2 as torchtitan applies it: each block sharded, bfloat16 with float32 sums, DCP checkpoints.

    python -m slurm_resilience.launcher --nproc-per-node 4 scripts/examples/titan.py

`parallelize` is torchtitan's `apply_fsdp`. With `--shard 2` on four ranks there are two copies of
the model, and a lost shard comes from the other one. Where there is one copy, it comes from the
newest checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from slurm_resilience.training import Checkpointer, Session, resilient
from slurm_resilience.training.recipes import llama
from slurm_resilience.training.recipes.train import TokenWindows

CONTEXT = 16
WARMUP_STEPS = 5


def parallelize(model: llama.Llama, mesh: DeviceMesh) -> None:
    """Shard each block, then the rest of the model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(model.blocks) - 1
    for number, block in enumerate(model.blocks):
        # The last one is needed again at once, by the backward.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=number < last)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def build(
    s: Session,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build anew whenever the block is entered: shards hold this world's process groups."""
    model = llama.Llama(llama.LlamaShape(width=64, layers=3, context=CONTEXT)).to(s.device)
    parallelize(model, s.mesh())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / WARMUP_STEPS))
    return model, opt, warmup


def train(s: Session, steps: int) -> None:
    """Run the block."""
    model, opt, schedule = build(s)
    s.track(model=model, opt=opt, schedule=schedule)
    for batch in s.loader(TokenWindows("", CONTEXT), 32, steps=steps, epochs=None):
        tokens = batch.to(s.device)
        loss = llama.loss(model(tokens[:, :-1]).float(), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a collective: before the update
        with s.update():
            opt.step()
            schedule.step()
            opt.zero_grad()
        if s.rank == 0:
            print(f"step {s.step} loss {loss.item():.4f} world {s.world}", flush=True)
    whole = [parameter.full_tensor().detach().cpu().numpy() for parameter in model.parameters()]
    if s.rank == 0:
        digest = hashlib.sha256(b"".join(part.tobytes() for part in whole))
        print(f"parameters {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shard", type=int, default=2, help="ranks that share one copy")
    parser.add_argument("--checkpoints", type=Path, help="a directory that all ranks share")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    given = parser.parse_args()
    disk = Checkpointer(given.checkpoints, every=given.every) if given.checkpoints else None
    resilient(replica_size=given.shard, checkpointer=disk)(train)(given.steps)
