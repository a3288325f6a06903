"""The same job under slurm_resilience.training."""

from __future__ import annotations

import os
from typing import Any

from events import Events

EVENTS = Events(int(os.environ["RANK"]))
EVENTS.say("start")

from job import build, loss_of  # noqa: E402

from slurm_resilience.training import Session, resilient  # noqa: E402


def hear(name: str, details: dict[str, Any]) -> None:
    EVENTS.say(name, world=details.get("world", 0))


@resilient(min_world=2, on_event=hear)
def train(s: Session, model: Any, optimizer: Any) -> None:
    s.track(model=model, optimizer=optimizer)
    net = s.ddp(model)
    EVENTS.say("form", world=s.world)
    while True:
        loss = loss_of(net, s.rank, s.step)
        EVENTS.maybe_raise()
        loss.backward()
        with s.update():
            optimizer.step()
            optimizer.zero_grad()
        EVENTS.say("step", s.step, s.world)


if __name__ == "__main__":
    # Built before this process joins: the others do not wait for it.
    train(*build())
