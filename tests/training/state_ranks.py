"""Runs a function on several ranks, in processes of their own, over gloo on loopback."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_resilience.mesh.model import Member, Peer, Status, View

DEADLINE = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
# A rank is forked from a process that has imported what every rank needs.
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "slurm_resilience.training.state.partner"]
)


def view_of(statuses: list[Status], replica_size: int = 1, generation: int = 2) -> View:
    """A generation on nodes of their own, with the rank as seat."""
    members = tuple(
        Member(Peer(id=f"p{rank}", seat=rank, node=f"n{rank}"), status)
        for rank, status in enumerate(statuses)
    )
    return View(generation, members, replica_size, len(members))


def run(body: Callable[..., Any], world: int, path: Path, *args: Any) -> list[Any]:
    """Call ``body(rank, group, *args)`` on every rank; returns what each returned.

    A rank that dies gives its exit code. An exception in a rank fails the caller, with the rank's
    trace, unless another rank died (then it is an answer, as the exception's name and text).
    """
    path.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(world):
        here, there = _CONTEXT.Pipe(duplex=False)
        call = (body, rank, world, str(path / "store"), there, args)
        process = _CONTEXT.Process(target=_rank, args=call, daemon=True)
        process.start()
        there.close()
        ranks.append((process, here))
    end = time.monotonic() + DEADLINE
    found: list[Any] = []
    try:
        for rank, (process, here) in enumerate(ranks):
            assert here.poll(max(0.0, end - time.monotonic())), f"rank {rank} did not answer"
            try:
                found.append(here.recv())
            except EOFError:
                process.join(5)
                found.append(("died", process.exitcode))
    finally:
        for process, _ in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
    died = any(kind == "died" for kind, _ in found)
    for rank, (kind, answer) in enumerate(found):
        assert kind != "raised" or died, f"rank {rank}:\n{answer}"
    return [answer for _, answer in found]


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
        pipe.send(("ok", body(rank, dist.group.WORLD, *args)))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    pipe.close()
    # Skips destructors of groups that are broken on purpose.
    os._exit(0)
