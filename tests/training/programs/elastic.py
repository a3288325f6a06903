"""A small training by microbatches. Every rank appends JSON lines to ``LOG/SEAT.PID.jsonl``."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from slurm_resilience.training import Session, resilient

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--late", action="store_true", help="replaced only after a step without it")
parser.add_argument("--shard", action="store_true", help="a model in two parts")
parser.add_argument("--sizes", default="", help="worlds, each for so many steps: 2,4,3")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
words = parser.parse_args()
SIZES = [int(word) for word in words.sizes.split(",") if word]
SEATS = int(os.environ["SRES_SEATS"])
SIZE, COUNT = 4, 8
PARTS = 2 if words.shard else 1
torch.set_num_threads(1)
_log = (words.log / f"{os.environ['SRES_SEAT']}.{os.getpid()}.jsonl").open("a", buffering=1)


def tell(event: str, *details: Any) -> None:
    _log.write(json.dumps([time.monotonic(), event, *details]) + "\n")


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __len__(self) -> int:
        return words.steps * SIZE * COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().view(1).sin(), index


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 37), nn.Tanh(), nn.Dropout(0.2), nn.Linear(37, 1))
    return net, torch.optim.AdamW(net.parameters(), 1e-2)


def come_late() -> None:
    """Wait until the others have made a step in a smaller world."""
    stepped = re.compile(r'^\[[0-9.]+, "step", [0-9]+, [0-9]+, ([0-9]+)', re.MULTILINE)
    deadline = time.monotonic() + 60
    while not any(
        int(world) < SEATS
        for path in words.log.glob("*.jsonl")
        for world in stepped.findall(path.read_text())
    ):
        if time.monotonic() > deadline:
            sys.exit("no rank steps in a smaller world")
        time.sleep(0.05)


def wait_for_the_lost(s: Session) -> None:
    """Wait until the world ends because the lost rank is back."""
    deadline = time.monotonic() + 90
    assert s.watch is not None
    with s.watch.pause():
        while time.monotonic() < deadline:
            s.check()
            time.sleep(0.05)
    sys.exit("the lost rank does not come back")


def wait_for_size(s: Session) -> None:
    """Wait until the world has the size in which this step is to be made."""
    wanted = SIZES[s.step * len(SIZES) // words.steps] if SIZES else s.world
    if s.world == wanted:
        return
    tell("waits", s.step, s.world, wanted)
    deadline = time.monotonic() + 400
    assert s.watch is not None
    with s.watch.pause():
        while time.monotonic() < deadline:
            s.check()
            time.sleep(0.02)
    sys.exit(f"no world of {wanted}")


def build_sharded(s: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same model anew, in two parts."""
    net, _ = build()
    fully_shard(net, mesh=s.mesh()["shard"])
    return net, torch.optim.AdamW(net.parameters(), 1e-2)


@resilient(min_world=PARTS, replica_size=PARTS)
def train(s: Session) -> tuple[nn.Module, int]:
    net, opt = build_sharded(s) if words.shard else s.once(build)
    s.track(net=net, opt=opt)
    wrapped = net if words.shard else s.ddp(net)
    tell("world", s.step, s.generation, s.world)
    for step in s.microbatches(Samples(), wrapped, size=SIZE, count=COUNT, same_bits=True):
        wait_for_size(s)
        time.sleep(words.pace)
        own = range(len(step)) if s.world <= COUNT else ()
        for number, (x, y, index) in zip(own, step, strict=True):
            counts = step._calls[number][1]
            # Told before it can count: if this world commits the step, every share is in it.
            tell("batch", s.step, s.generation, index.tolist() if counts else [])
            loss = nn.functional.mse_loss(wrapped(x), y)
            if counts:
                tell("loss", s.step, s.generation, index.tolist()[0], loss.item())
            step.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with s.update():
            opt.step()
        tell("step", s.step, s.generation, s.world)
        if words.late and s.world < SEATS and s.step >= 4:
            wait_for_the_lost(s)
    return net, s.rank % PARTS


if words.late and os.environ["SRES_INCARNATION"] != "0":
    come_late()
trained, part = train()
own = (p.to_local() if isinstance(p, DTensor) else p for p in trained.parameters())
parts = [parameter.detach().numpy().tobytes() for parameter in own]
tell("end", part, hashlib.sha256(b"".join(parts)).hexdigest())
