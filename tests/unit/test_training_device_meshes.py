"""When torch may go on with what it worked out for the device meshes of a world before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training import compat
from slurm_resilience.training.process_group.device_meshes import DeviceMeshes

PLACES = st.sampled_from(["two ranks", "four ranks", "four ranks, other groups", None])
WORLDS = st.lists(st.lists(PLACES, max_size=4), min_size=1, max_size=5)


class Mesh:
    """A device mesh; its place stands for all that `compat.mesh_place` tells of one."""

    def __init__(self, place: str | None, world: int) -> None:
        self.place = place
        self.world = world
        """The one that its groups are of."""


def place(name: str) -> compat.MeshPlace:
    key, _, groups = name.partition(",")
    return compat.MeshPlace((key,), (groups,), (0,), 0)


class Torch:
    """Holds what torch keeps: the mesh of each place that was used since it forgot all."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kept: dict[str, Mesh] = {}
        self.forgotten = 0
        patch.setattr(compat, "mesh_place", lambda mesh: mesh.place and place(mesh.place))
        patch.setattr(compat, "take_groups", self._take_groups)
        patch.setattr(compat, "forget_layouts", self._forget)

    def _take_groups(self, old: Mesh, new: Mesh) -> None:
        assert old.place == new.place
        old.world = new.world

    def _forget(self) -> None:
        self.kept.clear()
        self.forgotten += 1

    def use(self, mesh: Mesh) -> Mesh:
        """Return the mesh that the outcome of an operation has: meshes of the same ranks are one to
        torch, whatever their groups."""
        return self.kept.setdefault((mesh.place or "four ranks").partition(",")[0], mesh)


def run(meshes: DeviceMeshes, torch: Torch, worlds: list[list[str | None]]) -> None:
    for number, places in enumerate(worlds):
        meshes.world_begins()
        here: set[str | None] = set()
        for name in places:
            mesh = Mesh(name, number)
            meshes.made(mesh)
            here.add(name)
            found = torch.use(mesh)
            # Two meshes of the same ranks in one world are torch's own affair.
            assert found.place in here, "it goes on with groups of another place"
            assert found.world == number, "it goes on with groups that are dead"


@settings(max_examples=500)
@given(WORLDS)
def test_torch_never_goes_on_with_the_groups_of_another_world(
    worlds: list[list[str | None]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run(DeviceMeshes(), Torch(patch), worlds)


@pytest.mark.parametrize(
    ("worlds", "forgotten"),
    [
        ([["two ranks"], ["two ranks"], ["two ranks"]], 0),
        ([["two ranks", "four ranks"], ["two ranks"], ["two ranks", "four ranks"]], 0),
        ([["four ranks"], ["four ranks", "two ranks"], ["four ranks", "two ranks"]], 0),
        ([["four ranks"], ["two ranks"], ["two ranks"], ["four ranks"]], 2),
        ([["four ranks"], ["four ranks, other groups"]], 1),
        ([[None], [None], []], 4),
        ([["four ranks", None], ["four ranks"], ["four ranks"]], 2),
    ],
)
def test_torch_forgets_only_where_a_world_is_another(
    monkeypatch: pytest.MonkeyPatch, worlds: list[list[str | None]], forgotten: int
) -> None:
    torch = Torch(monkeypatch)
    run(DeviceMeshes(), torch, worlds)
    assert torch.forgotten == forgotten


def test_meshes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(compat, "mesh_place", lambda _: place("two ranks"))
    monkeypatch.setattr(compat, "take_groups", lambda old, _: taken.append(old))
    meshes = DeviceMeshes()
    for _ in range(5):
        meshes.world_begins()
        meshes.made(Mesh("two ranks", 0))
    assert not taken
