"""The job under the library, in turns with it and without it: a block of steps each."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist
from events import Events
from job import build, loss_of

from slurm_resilience.training import Session, Watch, resilient

BLOCK_STEPS = 20
"""With the mesh's thread held for so long, no peer counts as silent yet."""
TURNS = int(os.environ["BENCH_TURNS"])


@resilient(min_world=2, watch=Watch())
def train(s: Session) -> None:
    """Even turns are without the library, except that turns 2, 3, 6, 7 … change their places."""
    events = Events(s.rank)
    model, optimizer = s.once(build)
    s.track(model=model, optimizer=optimizer)
    net = s.ddp(model)

    def step_with() -> None:
        loss_of(net, s.rank, s.step).backward()
        with s.update():
            optimizer.step()
            optimizer.zero_grad()

    def step_without() -> None:
        loss_of(net, s.rank, s.step).backward()
        optimizer.step()
        optimizer.zero_grad()

    for turn in range(TURNS):
        without = turn % 4 in (0, 3)
        dist.barrier()
        if without:
            # What the mesh does in the background is the library's cost too: it stands still.
            with s._participant.mesh._lock:
                _block(events, turn, s.world, step_without)
        else:
            _block(events, turn, s.world, step_with)
    events.say("over", TURNS, s.world)


def _block(events: Events, turn: int, world: int, step: Callable[[], None]) -> None:
    events.say("begin", turn, world)
    for _ in range(BLOCK_STEPS):
        step()
    # The block is over when the last rank's is.
    dist.barrier()
    events.say("end", turn, world)


if __name__ == "__main__":
    train()
