"""The job under the library, in turns with it and without it: a block of steps each."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from events import Events
from job import DEVICE, build, loss_of

from slurm_resilience.training import Session, Watch, resilient

BLOCK_STEPS, TURNS = int(os.environ["BENCH_STEPS"]), int(os.environ["BENCH_TURNS"])

WARM_UPDATES = 300


class Threads:
    """The processor time of this process, by thread."""

    def __init__(self) -> None:
        mesh = next(one for one in threading.enumerate() if one.name == "sres-mesh")
        self._mesh = time.pthread_getcpuclockid(mesh.ident)

    def seconds(self) -> tuple[float, float, float]:
        """Seconds so far: the main thread's, the mesh's, and those of all others."""
        main, mesh = time.thread_time(), time.clock_gettime(self._mesh)
        return main, mesh, time.process_time() - main - mesh


@resilient(min_world=int(os.environ["BENCH_WORLD"]), watch=Watch())
def train(s: Session) -> None:
    """Even turns are without the library, except that turns 2, 3, 6, 7 … change their places."""
    events = Events(s.rank)
    model, optimizer = s.once(build)
    s.track(model=model, optimizer=optimizer)
    net = s.ddp(model)
    cpu_seconds: list[tuple[float, float, float]] = []
    """Processor seconds of each turn: of the main thread, of the mesh's, and of all others."""
    threads = Threads()
    digests: dict[int, tuple[float, int]] = {}
    """Step before which replicas were compared → seconds that it took, steps until the next."""

    updates: list[float] = []
    """Processor seconds of each update's begin and end, within a step."""
    instead: list[float] = []
    """The same where there is none: those of the clock."""

    def step_with() -> None:
        loss_of(net, s.rank, s.step).backward()
        before = time.thread_time()
        with s.update():
            began = time.thread_time()
            optimizer.step()
            optimizer.zero_grad()
            done = time.thread_time()
        updates.append(time.thread_time() - done + began - before)

    def step_without() -> None:
        loss_of(net, s.rank, s.step).backward()
        before = time.thread_time()
        began = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        done = time.thread_time()
        instead.append(time.thread_time() - done + began - before)

    # NCCL's ranks find each other through the mesh, in another thread than this one.
    step_with()
    for turn in range(TURNS):
        without = turn % 4 in (0, 3)
        # The hook that sees a backward wait is the library's too.
        s._participant.hooks.stop_listening()
        if not without and s.watch is not None:
            s._participant.hooks.listen(s.watch, net)
        dist.barrier()
        before = threads.seconds()
        if without:
            # What the mesh does in the background is the library's cost too: it stands still.
            with s._participant.mesh._lock:
                _block(events, turn, s.world, step_without)
        else:
            _block(events, turn, s.world, step_with)
        after = threads.seconds()
        cpu_seconds.append(tuple(b - a for a, b in zip(before, after, strict=True)))
        if s.compared:
            digests[s.compared["step"]] = s.compared["seconds"], s.compared["every"]
    costs = {
        "cpu_seconds": cpu_seconds,
        "digests": list(digests.values())[1:],
        "update_seconds": statistics.median(updates) - statistics.median(instead),
        "warm_seconds": _warm_seconds(s),
    }
    Path(os.environ["BENCH_DIR"], f"costs{s.rank}.json").write_text(json.dumps(costs))
    events.say("over", TURNS, s.world)


def _warm_seconds(s: Session) -> float:
    """Processor time of the main thread for an update that has nothing in it: the median."""
    found = []
    for _ in range(WARM_UPDATES):
        before = time.thread_time()
        with s.update():
            pass
        found.append(time.thread_time() - before)
    return statistics.median(found)


def _block(events: Events, turn: int, world: int, step: Callable[[], None]) -> None:
    events.say("begin", turn, world)
    for _ in range(BLOCK_STEPS):
        step()
    # The block is over when the last rank's is, and its GPU's.
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    dist.barrier()
    events.say("end", turn, world)


if __name__ == "__main__":
    train()
