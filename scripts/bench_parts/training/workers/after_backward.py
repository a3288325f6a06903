"""The same job, whole on each rank or in parts (HSDP); one rank raises right after backward, in
every second step."""

from __future__ import annotations

import os
from typing import Any

import torch
from events import Events
from job import build, loss_of
from torch.distributed.fsdp import fully_shard

from slurm_resilience.training import Session, resilient

FAULTS, VICTIM = int(os.environ["BENCH_FAULTS"]), int(os.environ["BENCH_VICTIM"])
REPLICA = int(os.environ["BENCH_REPLICA"])
"""Ranks that share one copy of the model; 1: each rank has it whole."""
EVENTS = Events(int(os.environ["RANK"]))
failed: set[int] = set()
"""Steps in which this process has raised."""


def sharded(s: Session) -> tuple[Any, torch.optim.Optimizer]:
    """Build the model in parts, over the ranks of this world."""
    model: Any = build()[0]
    mesh = s.mesh()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


# So long that no rank is given up because the machine is busy: that is measured elsewhere.
@resilient(min_world=2, replica_size=REPLICA, max_faults=FAULTS + 1, silence=30, abort_timeout=30)
def train(s: Session) -> None:
    model, optimizer = s.once(build) if REPLICA == 1 else sharded(s)
    s.track(model=model, optimizer=optimizer)
    # Its buckets stay: the same work in each world.
    net = s.ddp(model, find_unused_parameters=True) if REPLICA == 1 else model
    EVENTS.say("form", world=s.world)
    # In the steps between, all ranks come through.
    while s.step < 2 * FAULTS + 2:
        loss_of(net, s.rank, s.step).backward()
        if s.seat == VICTIM and s.step % 2 == 1 and s.step not in failed and len(failed) < FAULTS:
            failed.add(s.step)
            EVENTS.say("fault")
            raise RuntimeError(f"the benchmark wants this in step {s.step}")
        with s.update():
            optimizer.step()
            optimizer.zero_grad()
        EVENTS.say("step", s.step, s.world)
    EVENTS.say("over", s.step, s.world)


if __name__ == "__main__":
    train()
