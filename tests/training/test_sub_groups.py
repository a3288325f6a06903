"""Sub-groups of a world: a member that dies while they are made stops the others for a moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from slurm_resilience.training.process_group.form import ProcessGroups  # noqa: E402

pytestmark = pytest.mark.training

LIMIT = 1.0
LONG = 600.0


def formed(rank: int, world: int, store: str) -> ProcessGroups:
    """Return the world's default group, made anew with a short time limit for forming."""
    # One that leaves it while another one still connects would fail that one's start.
    dist.barrier()
    dist.destroy_process_group()
    mesh: Any = SimpleNamespace(own_fds=lambda: set())
    view: Any = SimpleNamespace(size=world)
    groups = ProcessGroups(mesh, view, rank, "gloo")
    groups.form(dist.FileStore(store, world), timeout=LONG, limit=20 * LIMIT)
    groups._limit = LIMIT
    return groups


def dies_before_its_mesh(rank: int, _: Callable[[Any], None], store: str) -> str:
    groups = formed(rank, 4, store)
    if rank == 3:
        os._exit(9)
    with pytest.raises(RuntimeError) as caught, groups.more(for_collectives=True):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        # Of a mesh of pairs, one rank has no pair with the dead one.
        dist.new_group([0, 1, 2, 3])
    return str(caught.value)


def is_late(rank: int, _: Callable[[Any], None], store: str) -> float:
    groups = formed(rank, 2, store)
    with groups.more(for_collectives=True):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        beside = dist.new_group()
    values = torch.ones(1)
    for group in (mesh.get_group("shard"), beside):
        if rank == 1:
            time.sleep(1.5 * LIMIT)
        dist.all_reduce(values, group=group)
    return float(values)


def test_a_dead_member_ends_the_making_of_a_mesh_for_all(tmp_path: Path) -> None:
    with Ranks(tmp_path, 4, dies_before_its_mesh, str(tmp_path / "again")) as ranks:
        assert ranks.answer(3) == ("died", 9)
        assert all(ranks.result(rank) for rank in range(3))


def test_collectives_may_take_longer_than_the_making_of_their_group(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, is_late, str(tmp_path / "again")) as ranks:
        assert ranks.results() == [4.0, 4.0]
