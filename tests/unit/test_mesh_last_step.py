"""The end of a training, over loopback: who says that it is over, and who is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_peers import crew, leave, meet, until, world

from slurm_resilience.mesh.rendezvous import SharedDirectory


def test_a_newcomer_beside_ranks_that_are_done_waits_to_be_told(tmp_path: Path) -> None:
    with crew(tmp_path, 4, min_world=4, replica_size=2) as peers:
        meshes = peers.several(4)
        view = world(meshes)
        leave(meshes[:2], view, "done")
        meshes[3].close()
        newcomer = peers.add(3, incarnation=1)
        until(lambda: len(newcomer.picture()[1]) == 4, "it sees all the others")
        with pytest.raises(TimeoutError):
            newcomer.meet(0.3)
        assert not newcomer._membership.side.standing.finished


def test_who_is_not_needed_is_told(tmp_path: Path) -> None:
    with crew(tmp_path, 4, min_world=2, replica_size=2, start_patience=0.0) as peers:
        meshes = peers.several(2)
        view = world(meshes)
        spare = peers.add(2)
        until(lambda: len(spare.picture()[1]) == 3, "the spare sees both")
        leave(meshes, view, "done")
        assert meet([*meshes, spare]) == [None, None, None]


def test_ranks_that_wait_find_the_outcome(tmp_path: Path) -> None:
    with crew(tmp_path, 4, min_world=4) as peers:
        meshes = peers.several(2)
        until(lambda: len(meshes[0].picture()[1]) == 2, "they know each other")
        SharedDirectory(tmp_path).outcome(0, 100, "")
        assert meet(meshes) == [None, None]


def test_a_process_that_leaves_while_it_is_done_ends_nothing(tmp_path: Path) -> None:
    with crew(tmp_path, 3, min_world=3) as peers:
        meshes = peers.several(3)
        view = world(meshes)
        leave(meshes[:2], view, "done")
        meshes[0].close("its seat was taken")
        until(lambda: meshes[1].end and meshes[2].end, "the others have lost it")
        with pytest.raises(TimeoutError):
            meshes[1].meet(0.3)
