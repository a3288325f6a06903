"""A plain DDP script, as torchrun starts it; with BENCH_CHECKPOINT it goes on from its last
checkpoint on disk, and reads its data through a DataLoader."""

from __future__ import annotations

import os
import time
from pathlib import Path

from events import Events

CHECKPOINT_EVERY = 10


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    events = Events(rank)
    events.say("start")
    import torch
    import torch.distributed as dist
    from job import build, loss_of
    from torch.nn.parallel import DistributedDataParallel

    events.say("imported")
    # Of the last process that sat on the rank: a fork has not paid for its modules.
    spent = Path(os.environ["BENCH_DIR"]) / f"import{rank}.cpu"
    spent.write_text(str(time.process_time()), encoding="ascii")
    dist.init_process_group("gloo")
    events.say("form", world=world)
    model, optimizer = build()
    step = 0
    file = os.environ.get("BENCH_CHECKPOINT")
    if file is not None:
        if Path(file).exists():
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            step = saved["step"]
        rows = torch.utils.data.TensorDataset(torch.randn(4096, 64))
        batches = iter(torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True))
        next(batches)
        events.say("loaded", step)
    net = DistributedDataParallel(model)
    while True:
        loss = loss_of(net, rank, step)
        events.maybe_raise()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        events.say("step", step, world)
        if file is not None and step % CHECKPOINT_EVERY == 0 and rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "step": step}, file + ".new")
            Path(file + ".new").replace(file)


if __name__ == "__main__":
    main()
