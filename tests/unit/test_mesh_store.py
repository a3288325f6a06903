"""The store's keys: the same for every member, ordered, and gone with their generation."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mesh_peers import LIMIT, crew, leave, until, world

from slurm_resilience.errors import WireError
from slurm_resilience.mesh.events import MessageReceived
from slurm_resilience.mesh.keys import ANSWERS_KEPT
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.messages import KeyChange, NewGeneration
from slurm_resilience.mesh.model import GenerationEnd, Member, PeerStatus, View, generation_number
from slurm_resilience.mesh.protocol.key_table import home_of


def test_a_key_is_there_for_all(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = peers.several(3)
        number = world(meshes).generation
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(m.get, number, ["late", "early"], LIMIT) for m in meshes]
            meshes[0].put(number, "early", b"1")
            meshes[2].put(number, "late", b"2")
            assert [found.result(LIMIT) for found in waiting] == [[b"2", b"1"]] * 3
        assert meshes[1].known(number) == {"early": b"1", "late": b"2"}


def test_what_is_seen_was_set_after_what_was_set_before(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        number = world(meshes).generation
        for turn in range(200):
            meshes[0].put(number, f"first {turn}", b"")
            meshes[0].put(number, f"second {turn}", b"")
        for turn in range(200):
            meshes[1].get(number, [f"second {turn}"], LIMIT)
            assert f"first {turn}" in meshes[1].known(number)


def test_every_member_adds_and_none_is_lost(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = peers.several(3)
        number = world(meshes).generation

        def add(index: int) -> list[int]:
            change = KeyChange(number, 0, "count", add=1)
            return [int(meshes[index].change(change, LIMIT)) for _ in range(50)]

        with ThreadPoolExecutor(3) as pool:
            seen = [value for own in pool.map(add, range(3)) for value in own]
        assert sorted(seen) == list(range(1, 151))
        until(
            lambda: all(m.known(number).get("count") == b"150" for m in meshes), "all know the sum"
        )


def test_a_long_generation_keeps_few_answers(tmp_path: Path) -> None:
    """A training may change keys for months without a fault."""
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        number = world(meshes).generation
        for _ in range(ANSWERS_KEPT + 20):
            for key in ("a", "b", "c", "d"):  # one of these is at home with each
                meshes[0].change(KeyChange(number, 0, key, add=1), LIMIT)
        with meshes[1]._lock:
            given = meshes[1]._keys._given
            assert [len(answers) for answers in given.values()] == [ANSWERS_KEPT]


def test_what_is_no_number_is_not_added_to(tmp_path: Path) -> None:
    with crew(tmp_path, 2, min_world=2) as peers:
        view = world(peers.several(2))
        for mesh in peers.all:  # one of them is the key's home
            mesh.put(view.generation, "text", b"text")
            assert mesh.get(view.generation, ["text"], LIMIT) == [b"text"]
        for mesh in peers.all:
            assert mesh.change(KeyChange(view.generation, 0, "text", add=1), LIMIT) == b""
        assert [mesh.end for mesh in peers.all] == [None, None]


def test_one_wins(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = peers.several(3)
        number = world(meshes).generation

        def take(index: int) -> bytes:
            wish = KeyChange(number, 0, "lock", expected=b"", desired=b"%d" % index)
            return meshes[index].change(wish, LIMIT)

        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(take, range(3)))) == 1
        held = meshes[0].get(number, ["lock"], LIMIT)[0]
        wrong = KeyChange(number, 0, "lock", expected=b"other", desired=b"mine")
        assert meshes[1].change(wrong, LIMIT) == held
        right = KeyChange(number, 0, "lock", expected=held, desired=b"mine")
        assert meshes[1].change(right, LIMIT) == b"mine"


def test_all_that_is_appended_is_there(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        number = world(meshes).generation
        with ThreadPoolExecutor(2) as pool:
            for letter, done in zip(
                b"ab",
                pool.map(
                    lambda pair: [
                        pair[0].change(KeyChange(number, 0, "line", append=pair[1]), LIMIT)
                        for _ in range(20)
                    ],
                    zip(meshes, (b"a", b"b"), strict=True),
                ),
                strict=True,
            ):
                assert done[-1].count(letter) == 20
        final = meshes[0].change(KeyChange(number, 0, "line", append=b""), LIMIT)
        assert sorted(final) == sorted(b"ab" * 20)


@pytest.mark.parametrize("way", ["over", "closed"])
def test_who_waits_is_told_at_once_that_it_is_over(tmp_path: Path, way: str) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        view = world(meshes)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(meshes[0].get, view.generation, ["never"], 10 * LIMIT)
            if way == "over":
                meshes[1].over(GenerationEnd(view.generation, "a fault"))
            else:
                meshes[1].close()
            with pytest.raises(WireError, match="is over"):
                waiting.result(LIMIT)


def test_a_key_that_nobody_sets(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as peers:
        (mesh,) = peers.several(1)
        number = world([mesh]).generation
        with pytest.raises(TimeoutError, match="'never'"):
            mesh.get(number, ["there", "never"][1:], 0.05)


def test_keys_go_with_their_generation(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        first = world(meshes)
        meshes[0].put(first.generation, "key", b"old")
        meshes[1].get(first.generation, ["key"], LIMIT)
        meshes[0].over(GenerationEnd(first.generation, "once"))
        until(lambda: all(mesh.end for mesh in meshes), "it is over")
        leave(meshes, first)
        second = world(meshes)
        assert meshes[1].known(second.generation) == {}
        assert meshes[1].known(first.generation) == {}
        with pytest.raises(WireError):
            meshes[1].change(KeyChange(first.generation, 0, "key", add=1), LIMIT)


def test_a_change_that_comes_before_the_generation_is_known_reaches_all(tmp_path: Path) -> None:
    """The proposal and a fast member's first change travel on different connections."""
    with crew(tmp_path, 9, min_world=9) as peers:
        meshes = peers.several(2)
        until(lambda: all(mesh.beats() for mesh in meshes), "both are connected")
        members = tuple(Member(mesh.me, PeerStatus()) for mesh in meshes)
        view = View(generation_number(1, 0), members, seats=9)
        first, home = meshes
        key = next(name for name in map(str, range(99)) if home_of(name, view) == home.me.id)
        with first._lock:
            first._take(told(home, view))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(first.change, KeyChange(view.generation, 0, key, add=1), LIMIT)
            assert answer.result(LIMIT) == b"1"
        assert key not in first.known(view.generation)
        with home._lock:
            home._take(told(first, view))
        assert first.get(view.generation, [key], LIMIT) == [b"1"]


def told(by: Mesh, view: View) -> MessageReceived:
    return MessageReceived(0, by.me.id, by.me.id, NewGeneration(view.generation, view))


def test_a_large_value_passes(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        number = world(meshes).generation
        value = bytes(range(256)) * (1 << 14)
        meshes[0].put(number, "large", value)
        assert meshes[1].get(number, ["large"], LIMIT) == [value]


def test_values_are_kept_once_for_late_members(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as peers:
        (mesh,) = peers.several(1)
        number = world([mesh]).generation
        for turn in range(1000):
            mesh.put(number, "same", b"%d" % turn)
        assert len(mesh._keys._table.own_puts()) == 1


def test_closing_wakes_who_waits_for_a_key(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as peers:
        (mesh,) = peers.several(1)
        number = world([mesh]).generation
        threading.Timer(0.1, mesh.close).start()
        begun = time.monotonic()
        with pytest.raises(WireError, match="closed"):
            mesh.get(number, ["never"], 10 * LIMIT)
        assert time.monotonic() - begun < LIMIT
