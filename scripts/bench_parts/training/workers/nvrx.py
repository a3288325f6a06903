"""The same job under nvidia-resiliency-ext's in-process restart, its intervals at 50 ms."""

# Annotations stay what they are: the wrapper looks for its own type among them.
import os
from datetime import timedelta

import torch.distributed as dist
from events import Events
from job import build, loss_of
from nvidia_resiliency_ext import inprocess
from torch.nn.parallel import DistributedDataParallel

TICK = timedelta(milliseconds=50)
GLOO_TIMEOUT = timedelta(seconds=1)
PORT = int(os.environ["MASTER_PORT"])


@inprocess.Wrapper(
    store_kwargs={"port": PORT + 1},
    monitor_thread_interval=TICK,
    monitor_process_interval=TICK,
    heartbeat_interval=TICK,
    progress_watchdog_interval=TICK,
    last_call_wait=TICK,
    heartbeat_timeout=timedelta(seconds=2),
    soft_timeout=timedelta(seconds=10),
    hard_timeout=timedelta(seconds=15),
    barrier_timeout=timedelta(seconds=30),
    completion_timeout=timedelta(seconds=30),
)
def train(events: Events, store: dist.Store, call: inprocess.CallWrapper = None) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"{call.iteration}", store),
        rank=rank,
        world_size=world,
        timeout=GLOO_TIMEOUT,
    )
    events.say("form", world=world)
    model, optimizer = build()
    net = DistributedDataParallel(model)
    step = 0
    while True:
        loss = loss_of(net, rank, step)
        events.maybe_raise()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        events.say("step", step, world)


def main() -> None:
    rank = int(os.environ["RANK"])
    events = Events(rank)
    events.say("start")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], PORT, is_master=rank == 0, timeout=timedelta(seconds=30)
    )
    train(events, store)


if __name__ == "__main__":
    main()
