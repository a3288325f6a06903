"""The same job under torchft: every rank is a replica group of its own."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from events import Events
from job import build, loss_of
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

TIMEOUT = timedelta(seconds=10)
GLOO_TIMEOUT = timedelta(seconds=0.5)
"""With a long one a survivor that has no ring neighbour among the dead waits until the others go on
without it, which takes the lighthouse's time to join: 1.1 s instead of 0.55."""


def main() -> None:
    seat = int(os.environ["BENCH_SEAT"])
    events = Events(seat)
    events.say("start")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model, plain = build()

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GLOO_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=2,
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=20),
        replica_id=f"replica{seat}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    net = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, plain)
    quorum: object = None
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        loss = loss_of(net, seat, step)
        events.maybe_raise()
        loss.backward()
        optimizer.step()
        world = manager.num_participants()
        if (manager._quorum_id, world) != quorum:
            quorum = manager._quorum_id, world
            events.say("form", world=world)
        # A step that was voted down does not count.
        if manager.current_step() > step:
            events.say("step", manager.current_step(), world)


if __name__ == "__main__":
    main()
