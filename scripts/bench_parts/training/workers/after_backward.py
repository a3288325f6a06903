"""The same job; one rank raises right after backward, in every second step."""

from __future__ import annotations

import os
from typing import Any

from events import Events
from job import build, loss_of

from slurm_resilience.training import Session, resilient

FAULTS, VICTIM = int(os.environ["BENCH_FAULTS"]), int(os.environ["BENCH_VICTIM"])
EVENTS = Events(int(os.environ["RANK"]))
failed: set[int] = set()
"""Steps in which this process has raised."""


# So long that no rank is given up because the machine is busy: that is measured elsewhere.
@resilient(min_world=2, max_faults=FAULTS + 1, silence=30, abort_timeout=30)
def train(s: Session, model: Any, optimizer: Any) -> None:
    s.track(model=model, optimizer=optimizer)
    # Its buckets stay: the same work in each world.
    net = s.ddp(model, find_unused_parameters=True)
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
    train(*build())
