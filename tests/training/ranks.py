"""Runs a function on several ranks, in processes of their own, over gloo on loopback."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

DEADLINE = 60.0
_FORKS = multiprocessing.get_context("forkserver")
# A rank is forked from a process that has imported what every rank needs.
_FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "slurm_resilience.training.state.partner",
    ]
)


class Ranks:
    """Ranks of one world, ended with the block.

    Args:
        path: directory of the world's store.
        world: how many.
        body: called on each as ``body(rank, say, *args)``; ``say(value)`` answers before its end.
    """

    def __init__(self, path: Path, world: int, body: Callable[..., Any], *args: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)
        store = str(path / f"store-{os.urandom(4).hex()}")
        self.world = world
        self.processes = []
        self._ends = []
        for rank in range(world):
            here, there = _FORKS.Pipe(duplex=False)
            call = (body, rank, world, store, there, args)
            process = _FORKS.Process(target=_rank, args=call, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(DEADLINE)

    def answer(self, rank: int) -> tuple[str, Any]:
        """Return what a rank says next, or returns (``ok``); its trace (``raised``); its exit code
        (``died``)."""
        assert wait([self._ends[rank]], DEADLINE), f"rank {rank} says nothing"
        try:
            kind, value = self._ends[rank].recv()
        except EOFError:
            self.processes[rank].join(DEADLINE)
            return "died", self.processes[rank].exitcode
        return kind, value

    def result(self, rank: int) -> Any:
        """The value of an answer; None when the rank died."""
        kind, value = self.answer(rank)
        assert kind != "raised", f"rank {rank}:\n{value}"
        return value if kind == "ok" else None

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in range(self.world)]


def _rank(
    body: Callable[..., Any], rank: int, world: int, store: str, pipe: Connection, args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=DEADLINE / 2),
        )
        pipe.send(("ok", body(rank, lambda value: pipe.send(("ok", value)), *args)))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    pipe.close()
    # Skips destructors of groups that are broken on purpose.
    os._exit(0)
