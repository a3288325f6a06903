"""Measure how long a process group takes to form, by the store that its ranks meet through.

All ranks are forked from one process that has torch loaded, have formed a group of their own
before, and start together; the time ends with the last rank's first all-reduce. Run as a program,
which prints one line of JSON, kind → seconds, or why not: ``stores.py SIZE KIND...``. A few ranks
form within milliseconds, so they do it several times; the median counts.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from drive import free_port

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import SharedDirectory
from slurm_resilience.training.process_group import MeshStore

KINDS = {
    "rootless": "rootless (MeshStore, mesh up before)",
    "rootless_cold": "rootless, the mesh starts too",
    "tcpstore": "TCPStore, server up before",
    "tcpstore_racing": "TCPStore, rank 0 starts it",
}
RANKS_IN_ALL = 36
"""Ranks that form a group in one call for one kind: 9 times 4, twice 16, once 32."""
_LIMIT = timedelta(seconds=30)
_HEAD_START = 0.05
"""Seconds in which the barrier has let all of them go."""


class Round(NamedTuple):
    """The settings that the ranks of one round share."""

    kind: str
    size: int
    home: Path
    port: int
    start: Any
    """Barrier of all ranks."""
    instant: Any
    """When they begin: who comes last to the barrier sets it (monotonic). A barrier lets its ranks
    go one after the other, which takes as long as a small group takes to form."""
    answers: Any


def _store(round: Round, rank: int, met: tuple[Mesh, int] | None) -> dist.Store:
    if round.kind.startswith("rootless"):
        return MeshStore(*(met or _meet(round, rank)))
    return dist.TCPStore(
        "127.0.0.1",
        round.port,
        is_master=round.kind == "tcpstore_racing" and rank == 0,
        wait_for_workers=False,
        timeout=_LIMIT,
    )


def _meet(round: Round, rank: int) -> tuple[Mesh, int]:
    """Start the mesh, which lives as long as its process while stores come and go."""
    peer = Peer(id=f"{rank}.{uuid.uuid4().hex}", seat=rank, host="127.0.0.1", pid=os.getpid())
    rules = WorldRules(seats=round.size, min_world=round.size)
    mesh = Mesh(SharedDirectory(round.home / "meet"), peer, rules).start()
    view = mesh.meet(_LIMIT.total_seconds())
    assert view is not None
    return mesh, view.generation


def _rank(round: Round, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    met = _meet(round, rank) if round.kind == "rootless" else None
    if round.start.wait(_LIMIT.total_seconds()) == 0:
        round.instant.value = time.monotonic() + _HEAD_START
    round.start.wait(_LIMIT.total_seconds())
    time.sleep(max(0.0, round.instant.value - time.monotonic()))
    store = _store(round, rank, met)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=round.size, timeout=_LIMIT)
    token = torch.ones(1)
    dist.all_reduce(token)
    ended = time.monotonic()
    assert token.item() == round.size
    round.answers.put(ended - round.instant.value)
    # No rank leaves while another still needs it.
    round.start.wait(_LIMIT.total_seconds())
    os._exit(0)


def measure(kind: str, size: int) -> float:
    """Seconds from the common start to the last rank's first all-reduce."""
    fork = multiprocessing.get_context("fork")
    server, port = None, free_port()
    if kind == "tcpstore":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = server.port
    with tempfile.TemporaryDirectory(prefix="sres-bench-") as home:
        start, instant = fork.Barrier(size), fork.Value("d", 0.0)
        round = Round(kind, size, Path(home), port, start, instant, fork.SimpleQueue())
        ranks = [fork.Process(target=_rank, args=(round, rank)) for rank in range(size)]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(2 * _LIMIT.total_seconds())
            if any(process.exitcode for process in ranks):
                raise RuntimeError(f"{kind}, {size} ranks: a rank failed")
            times = [round.answers.get() for _ in ranks]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join(10)
    del server
    return max(times)


def main() -> None:
    size = int(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    # The ranks share these pages; a collection would copy them all in each.
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {kind: [] for kind in sys.argv[2:]}
    failed: dict[str, str] = {}
    for _ in range(max(1, RANKS_IN_ALL // size)):
        for kind in times:
            try:
                times[kind].append(measure(kind, size))
            except RuntimeError as error:
                failed[kind] = str(error)
    medians = {kind: statistics.median(found) for kind, found in times.items() if found}
    print(json.dumps({**medians, **failed}))


if __name__ == "__main__":
    main()
