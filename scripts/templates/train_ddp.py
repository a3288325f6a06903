#!/usr/bin/env python3
"""A small DDP training with checkpoints, to start from: gloo on CPUs, NCCL on GPUs.

Runs under ``srun --auto-resume=1`` (one task a GPU, or one a node), under torchrun, and alone. Data
and initial parameters follow from ``--seed`` and the step alone, so a run that was interrupted and
resumed ends with the same bits as one that was not.

What makes it resumable is marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurm_resilience.resume import attempt


def world() -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun, from Slurm, or alone."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if "RANK" in os.environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, size, local = (
        int(os.environ.get(name, alone)) for name, alone in zip(names, "010", strict=True)
    )
    # Under --auto-resume both are set, anew for each attempt; this is for plain srun, and alone.
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = first_node() if size > 1 else "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29400")
    return rank, size, local


def first_node() -> str:
    """Return the node of rank 0."""
    nodes = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    return subprocess.run(nodes, capture_output=True, text=True, check=True).stdout.split()[0]


def build(seed: int, width: int, device: torch.device) -> nn.Module:
    """Build the model: the same on every rank, because the seed is."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    ).to(device)


def batch(
    seed: int, step: int, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of one step and rank: features (64, 32) and targets (64, 1)."""
    source = torch.Generator().manual_seed(seed * 1_000_003 + step * 1_009 + rank)
    x = torch.randn(64, 32, generator=source)
    return x.to(device), torch.sin(x.sum(dim=1, keepdim=True)).to(device)


# (1) A checkpoint is complete or absent: written aside, renamed when whole; and only by the attempt
#     that is still valid, so that a node which was cut off cannot overwrite a newer one.
def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    aside = folder / f".step-{step:08d}.{os.getpid()}"
    torch.save(state, aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    if not attempt.is_current():
        aside.unlink()
        why = "a later attempt has begun, or $SRES_DIR cannot be read here"
        print(f"step {step} was NOT saved: {why}", file=sys.stderr, flush=True)
        return False
    aside.replace(folder / f"step-{step:08d}.pt")
    attempt.report(step)
    return True


# (2) The newest checkpoint that can be read wins; a damaged one is passed over.
def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    names = sorted(p for p in folder.glob("step-*.pt") if re.fullmatch(r"step-\d{8}\.pt", p.name))
    for path in reversed(names):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return int(state["step"])
        except Exception as error:  # any damage: torch names no common base
            print(f"checkpoint {path.name} passed over: {error}", file=sys.stderr)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds a step takes")
    parser.add_argument("--log", type=Path, help="rank 0 writes one JSON line a step here")
    args = parser.parse_args()

    # (3) Ask to be ended quickly: a rank that hangs in a collective must not need SIGKILL's grace.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    rank, size, local = world()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local % torch.cuda.device_count()) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=size)
    args.folder.mkdir(parents=True, exist_ok=True)
    model = build(args.seed, args.width, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # (4) Every rank starts from the step that rank 0 found.
    start = torch.tensor([load(args.folder, model, optimizer)], device=device)
    dist.broadcast(start, 0)
    found = load(args.folder, model, optimizer) if rank else int(start)
    if found != int(start):
        raise SystemExit(f"rank {rank} sees checkpoint {found}, rank 0 sees {int(start)}")
    # After its first step DDP rearranges its buckets, and so the order in which gradients are
    # summed: a resumed run would differ in the last bits. With this flag it does not; leave it out
    # where bits do not matter.
    ddp = DistributedDataParallel(model, find_unused_parameters=True)

    log = args.log.open("a", buffering=1) if args.log and rank == 0 else None
    for step in range(int(start) + 1, args.steps + 1):
        began = time.monotonic()
        x, y = batch(args.seed, step, rank, device)
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if log:
            line = {"at": time.time(), "step": step, "loss": loss.item(), "token": attempt.token()}
            log.write(json.dumps(line | {"process": os.getpid()}) + "\n")
        if step % args.checkpoint_every == 0 and rank == 0:
            save(args.folder, step, model, optimizer)
        left = args.pace - (time.monotonic() - began)
        if left > 0:
            time.sleep(left)
    if rank == 0:
        if args.steps % args.checkpoint_every and not save(
            args.folder, args.steps, model, optimizer
        ):
            raise SystemExit("a later attempt has taken over")
        # No word of the loss: an attempt that begins after the last step has computed none.
        print(f"done: {args.steps} steps on {size} ranks")
    dist.barrier()
    # The wrapper goes before the group: as the last to hold it, it would wait for gloo's threads
    # with Python's lock held, and one of them may wait for that lock. Such a rank never ends.
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
