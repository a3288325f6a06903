"""The same job, plain or under the library: a block of steps each time the driver says so."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from events import Events
from job import build, loss_of
from torch.nn.parallel import DistributedDataParallel

BLOCK_STEPS = 40
_nap = threading.Event()


def blocks(events: Events, step: Callable[[], None], world: int) -> None:
    """Wait for the file ``go-N``, make a block of steps, and say when it began and ended."""
    for _ in range(10):
        step()
    turn = 0
    while True:
        events.say("ready", turn, world)
        go = Path(os.environ["BENCH_DIR"], f"go-{os.environ['BENCH_MODE']}-{turn}")
        while not go.exists():
            _nap.wait(0.005)
        dist.barrier()
        events.say("begin", turn, world)
        for _ in range(BLOCK_STEPS):
            step()
        events.say("end", turn, world)
        turn += 1


def plain() -> None:
    """As without the library."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model, optimizer = build()
    net = DistributedDataParallel(model)
    done = 0

    def step() -> None:
        nonlocal done
        loss_of(net, rank, done).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1

    blocks(Events(rank), step, world)


def under_library() -> None:
    """With everything on: recovery, state, the mesh's thread, the watch over hangs."""
    from slurm_resilience.training import Session, Watch, resilient

    @resilient(min_world=2, watch=Watch())
    def train(s: Session) -> None:
        model, optimizer = s.once(build)
        s.track(model=model, optimizer=optimizer)
        net = s.ddp(model)

        def step() -> None:
            loss_of(net, s.rank, s.step).backward()
            with s.update():
                optimizer.step()
                optimizer.zero_grad()

        blocks(Events(10 + s.rank), step, s.world)

    train()


if __name__ == "__main__":
    (plain if sys.argv[1] == "plain" else under_library)()
