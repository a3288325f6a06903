"""Start a process group without a root: the ranks meet in a shared directory or at known addresses.

`resilient` does this by itself for every world. `rootless` is the same start for a program that
uses nothing else of this package.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import PeerStatus
from slurm_resilience.mesh.rendezvous import rendezvous_at
from slurm_resilience.mesh.world_plan import WorldRules
from slurm_resilience.training.process_group.mesh_store import MeshStore
from slurm_resilience.training.rank_environment import (
    read_environment,
    this_peer,
)


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

    The store answers until the block is left or another rank leaves or dies. Groups that were
    formed by then work on; form new ones only while all ranks are inside.

    Args:
        environment: says where this rank sits and where the ranks meet, as docs/training.md lists
            it (`SRES_SEAT`, `SRES_SEATS`, `SRES_MEET` …); default: `os.environ`.
        timeout: seconds to wait for the other ranks.

    Raises:
        UsageError: the environment makes no sense.
        TimeoutError: a rank did not come in time; the message says which are missing.
    """
    where = read_environment(os.environ if environment is None else environment)
    rules = WorldRules(seats=where.seats, min_world=where.seats)
    mesh = Mesh(rendezvous_at(where.meet, where.secret), this_peer(where), rules).start()
    try:
        view = mesh.meet(timeout)
        if view is None:
            raise UsageError(f"{where.meet}: a training that met here is over; choose another")
        mesh.say(PeerStatus("running", view.generation, 0))
        yield RootlessWorld(view.rank_of(mesh.me.id), view.size, MeshStore(mesh, view.generation))
    finally:
        mesh.close()
