"""A world like the one before goes on with what torch worked out there; another one does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from slurm_resilience.training import compat  # noqa: E402
from slurm_resilience.training.process_group.device_meshes import DeviceMeshes  # noqa: E402

pytestmark = pytest.mark.training


class Worlds:
    """Worlds of one rank that follow each other in this process."""

    def __init__(self, directory: Path, meshes: DeviceMeshes) -> None:
        self._directory = directory
        self._meshes = meshes
        self._number = 0

    def next(self) -> None:
        """Leave the world, and begin another."""
        self.leave()
        self._number += 1
        self._meshes.world_begins()
        compat.number_groups_anew()
        store = dist.FileStore(str(self._directory / f"store{self._number}"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worlds]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    make = DeviceMesh.__init__
    compat.forget_layouts()
    meshes = DeviceMeshes()
    meshes.watch()
    worlds = Worlds(tmp_path, meshes)
    yield worlds
    DeviceMesh.__init__ = make  # type: ignore[method-assign]
    worlds.leave()
    compat.forget_layouts()


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations whose layouts torch works out."""
    found: list[str] = []
    propagator = DTensor._op_dispatcher.sharding_propagator
    work_out = propagator.propagate_op_sharding_non_cached

    def noted(schema: Any) -> Any:
        found.append(str(schema.op))
        return work_out(schema)

    monkeypatch.setattr(propagator, "propagate_op_sharding_non_cached", noted)
    return found


def doubled(mesh: DeviceMesh) -> Any:
    return DTensor.from_local(torch.ones(4), mesh, [Shard(0)]) * 2


def test_a_world_like_the_one_before_works_nothing_out(
    worlds: Worlds, worked_out: list[str]
) -> None:
    for _ in range(3):
        before = len(worked_out)
        worlds.next()
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        outcome = doubled(mesh["shard"])
        assert outcome.full_tensor().tolist() == [2.0] * 4
        # Its groups are those of this world, by whatever object of torch's they are reached.
        assert outcome.device_mesh.get_group() is mesh["shard"].get_group()
        assert outcome.device_mesh._get_root_mesh()._pg_registry is mesh._pg_registry
    assert before > 0
    assert len(worked_out) == before


def test_a_world_with_other_groups_works_all_out(worlds: Worlds, worked_out: list[str]) -> None:
    for _ in range(3):
        before = len(worked_out)
        worlds.next()
        # A group of its own: the default group would have the same name in each world.
        mesh = DeviceMesh.from_group(dist.new_group([0]), "cpu")
        assert doubled(mesh).device_mesh is mesh
        assert len(worked_out) > before
