"""Start a process group without a root: the ranks meet in a shared directory or at known addresses.

`resilient` does this by itself for every world. `rootless` is the same start for a program that
uses nothing else of this package.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import PeerStatus
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import rendezvous_at
from slurm_resilience.training.process_group.gloo_interface import listen_beside_mesh
from slurm_resilience.training.process_group.mesh_store import MeshStore
from slurm_resilience.training.rank_environment import (
    read_environment,
    this_peer,
)

LEAVES = "sres/leaves/"
"""Begin of the keys by which the ranks say that they are at the end of the block."""


class RootlessWorld(NamedTuple):
    """Arguments for `torch.distributed.init_process_group`."""

    rank: int
    size: int
    store: MeshStore


@contextlib.contextmanager
def rootless(
    environment: Mapping[str, str] | None = None, *, timeout: float = 600.0
) -> Iterator[RootlessWorld]:
    """Meet the other ranks, and yield a store that lives in all of them.

    The store answers as long as all ranks are inside. A rank that comes to the end of the block
    waits there for the others, which may still form their groups; one that leaves by an exception,
    or dies, ends the store for all. Groups that were formed by then work on.

    Args:
        environment: says where this rank sits and where the ranks meet, as docs/training.md lists
            it (`SRES_SEAT`, `SRES_SEATS`, `SRES_MEET` …); default: `os.environ`.
        timeout: seconds to wait for the other ranks, at the begin and at the end.

    Raises:
        UsageError: the environment makes no sense.
        TimeoutError: a rank did not come in time; the message says which are missing.
    """
    where = read_environment(os.environ if environment is None else environment)
    rules = WorldRules(seats=where.seats, min_world=where.seats)
    met = rendezvous_at(where.meet, where.secret)
    mesh = Mesh(met, this_peer(where), rules, speakers=where.speakers).start()
    try:
        view = mesh.meet(timeout)
        if view is None:
            raise UsageError(f"{where.meet}: a training that met here is over; choose another")
        mesh.say(PeerStatus("running", view.generation, 0))
        listen_beside_mesh(mesh.me.host)
        world = RootlessWorld(view.rank_of(mesh.me.id), view.size, MeshStore(mesh, view.generation))
        yield world
        _leave_together(world, timeout)
    finally:
        mesh.close()


def _leave_together(world: RootlessWorld, timeout: float) -> None:
    """Wait until every rank is at the end of the block: its keys go with the first that leaves."""
    world.store.set(f"{LEAVES}{world.rank}", b"")
    # The store ends early if a rank died, or saw all keys first. This rank has what it came for.
    with contextlib.suppress(dist.DistStoreError):
        keys = [f"{LEAVES}{rank}" for rank in range(world.size)]
        world.store.wait(keys, timedelta(seconds=timeout))
