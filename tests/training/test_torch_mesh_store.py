"""The mesh as torch sees it: a store, also behind torch's own prefixes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
dist = pytest.importorskip("torch.distributed")

from slurm_resilience.mesh.mesh import Mesh  # noqa: E402
from slurm_resilience.mesh.model import GenerationEnd, Peer, PeerStatus, View  # noqa: E402
from slurm_resilience.mesh.protocol.world_plan import WorldRules  # noqa: E402
from slurm_resilience.mesh.rendezvous import SharedDirectory  # noqa: E402
from slurm_resilience.training.process_group.mesh_store import MeshStore  # noqa: E402

pytestmark = pytest.mark.training
LIMIT = 20.0
SIZE = 3


@pytest.fixture
def meshes(tmp_path: Path) -> Iterator[list[Mesh]]:
    """A world of three, in one process."""
    made = []
    for seat in range(SIZE):
        peer = Peer(f"peer-{seat}", seat, node=f"node{seat}", host="127.0.0.1")
        made.append(Mesh(SharedDirectory(tmp_path), peer, WorldRules(SIZE, SIZE)).start())
    try:
        for mesh in made:
            mesh.say(PeerStatus())
        with ThreadPoolExecutor(SIZE) as pool:
            views = list(pool.map(lambda mesh: mesh.meet(LIMIT), made))
        assert len(set(views)) == 1 and views[0] is not None
        for mesh in made:
            mesh.say(PeerStatus("running", views[0].generation, 0))
        yield made
    finally:
        for mesh in made:
            mesh.close()


def view_of(meshes: list[Mesh]) -> View:
    view = meshes[0].current
    assert view is not None
    return view


@pytest.fixture
def stores(meshes: list[Mesh]) -> list[MeshStore]:
    made = [MeshStore(mesh, view_of(meshes).generation) for mesh in meshes]
    for store in made:
        store.set_timeout(timedelta(seconds=LIMIT))
    return made


def test_a_value_is_the_same_for_all(stores: list[MeshStore]) -> None:
    stores[0].set("text", "grüße")
    stores[1].set("bytes", b"\0\xff")
    for store in stores:
        assert store.get("text") == "grüße".encode()
        assert store.multi_get(["bytes", "text"]) == [b"\0\xff", "grüße".encode()]
        assert store.check(["bytes", "text"])
        assert not store.check(["bytes", "other"])
        assert store.num_keys() == 2


def test_counters_do_not_lose_a_count(stores: list[MeshStore]) -> None:
    def add(store: MeshStore) -> list[int]:
        return [store.add("count", 2) for _ in range(30)]

    with ThreadPoolExecutor(SIZE) as pool:
        seen = sorted(value for own in pool.map(add, stores) for value in own)
    assert seen == list(range(2, 2 * 30 * SIZE + 1, 2))


def test_compare_set_has_one_winner(stores: list[MeshStore]) -> None:
    with ThreadPoolExecutor(SIZE) as pool:
        answers = set(pool.map(lambda n: stores[n].compare_set("leader", "", str(n)), range(SIZE)))
    assert len(answers) == 1
    held = answers.pop()
    assert stores[0].compare_set("leader", b"nobody", b"x") == held
    assert stores[1].compare_set("leader", held, b"x") == b"x"


def test_append(stores: list[MeshStore]) -> None:
    for store in stores:
        store.append("line", "ab")
    assert stores[0].compare_set("line", "", "") == b"ababab"


def test_behind_torchs_prefixes(stores: list[MeshStore]) -> None:
    inner = [dist.PrefixStore("inner", dist.PrefixStore("outer", store)) for store in stores]
    inner[0].set("key", "value")
    assert inner[1].get("key") == b"value"
    inner[2].wait(["key"], timedelta(seconds=LIMIT))
    assert [store.add("count", 1) for store in inner] == [1, 2, 3]
    assert inner[0].check(["key"])


def test_a_missing_key_is_torchs_error(stores: list[MeshStore]) -> None:
    with pytest.raises(dist.DistStoreError, match="'none'"):
        stores[0].wait(["none"], timedelta(seconds=0.05))
    stores[0].set_timeout(timedelta(seconds=0.05))
    assert stores[0].timeout == timedelta(seconds=0.05)
    with pytest.raises(dist.DistStoreError, match="'none'"):
        stores[0].get("none")


@pytest.mark.parametrize("behind_a_prefix", [False, True])
def test_who_waits_is_told_that_it_is_over(
    meshes: list[Mesh], stores: list[MeshStore], behind_a_prefix: bool
) -> None:
    store = dist.PrefixStore("p", stores[0]) if behind_a_prefix else stores[0]
    told: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never")
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    meshes[1].over(GenerationEnd(view_of(meshes).generation, "a fault elsewhere"))
    thread.join(LIMIT / 2)  # the store's own limit is longer
    assert not thread.is_alive()
    assert len(told) == 1 and "a fault elsewhere" in str(told[0])
    with pytest.raises(dist.DistStoreError, match="over"):
        stores[1].add("count", 1)
