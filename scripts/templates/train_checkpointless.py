#!/usr/bin/env python3
"""A small DDP training that goes on when a node dies, to start from: gloo on CPUs, NCCL on GPUs.

    srun --auto-resume=1 --ntasks-per-node=1 python -m slurm_resilience.launcher \\
        --nproc-per-node 8 scripts/templates/train_checkpointless.py

The ranks that are left form a smaller world and go on with the next step, from their own memory;
those that come in place of the lost ones get the state from a peer. What makes it so is marked with
(1) to (4).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from slurm_resilience.training import Checkpointer, Session, resilient


class Sines(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Features (32,), target (1,), and the sample's number."""

    def __len__(self) -> int:
        return 65536

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return x, torch.sin(x.sum(dim=0, keepdim=True)), index


def build(width: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Everything that has to survive: the same on every rank, because the seed is."""
    torch.manual_seed(seed)
    gpu = torch.cuda.is_available()
    model = nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    ).to("cuda" if gpu else "cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


# (1) The block: called again, in the living process, whenever the world has changed.
def train(s: Session, args: argparse.Namespace) -> None:
    model, optimizer = s.once(build, args.width, args.seed)
    # (2) What is tracked is brought to the newest step that any rank has.
    s.track(model=model, optimizer=optimizer)
    net = s.ddp(model)
    log = StepLog(args.log, s) if args.log else None
    # (3) The global batch stays the same; each rank's share of it follows the world.
    batches = s.loader(Sines(), args.global_batch, steps=args.steps, epochs=None, seed=args.seed)
    for x, y, numbers in batches:
        began = time.monotonic()
        if log:
            log.write("took", s.step + 1, samples=numbers.tolist())
        loss = nn.functional.mse_loss(net(x.to(s.device)), y.to(s.device))
        loss.backward()
        # (4) The only place where the state changes: all of it, or none.
        with s.update():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if log:
                log.write("done", s.step + 1, loss=loss.item(), share=len(numbers))
        time.sleep(max(0.0, args.pace - (time.monotonic() - began)))
    if log:
        bits = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
        log.write("end", s.step, digest=hashlib.sha256(bits).hexdigest())
    if s.rank == 0:
        print(f"done: {s.step} steps, {s.world} ranks at the end, {s.generation} worlds")


class StepLog:
    """One JSON line before and one after each step, in a file for each process."""

    def __init__(self, folder: Path, s: Session) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{s.seat}.{os.environ.get('SRES_INCARNATION', '0')}.jsonl"
        self._fixed = {"seat": s.seat, "world": s.world, "generation": s.generation}

    def write(self, what: str, step: int, **more: object) -> None:
        line = {"at": time.time(), "what": what, "step": step} | self._fixed | more
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--min-world", type=int, default=2, help="ranks that are enough to go on")
    parser.add_argument("--checkpoints", type=Path, help="a directory that all nodes share")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds a step takes")
    parser.add_argument("--log", type=Path, help="a directory: each rank tells its steps there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    disk = Checkpointer(given.checkpoints, every=100) if given.checkpoints else None
    resilient(min_world=given.min_world, checkpointer=disk)(train)(given)
