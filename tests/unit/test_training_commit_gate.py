"""A step of a model in parts is finished by all ranks that can, or by none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_peers import LIMIT, Crew, crew, world

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd, PeerStatus, View
from slurm_resilience.training.recovery.commit_gate import come_through, through
from slurm_resilience.training.recovery.exceptions import Interrupted

GENERATION, STEP = 5, 6
THROUGH = PeerStatus("ready", GENERATION, STEP + 1)
LEFT_BEFORE = PeerStatus("ready", GENERATION, STEP)
AT_GATE = PeerStatus("running", GENERATION, STEP, gate=STEP + 1)
NO_WORD = PeerStatus("running", GENERATION, STEP)
VOID = PeerStatus("ready", GENERATION, STEP, dirty=True)
OLD = PeerStatus("ready", GENERATION - 1, STEP)


@given(st.permutations([THROUGH, LEFT_BEFORE, AT_GATE, NO_WORD, VOID, OLD]))
def test_one_who_got_through_decides(others: list[PeerStatus]) -> None:
    assert through(GENERATION, STEP, others) is True


@given(st.lists(st.sampled_from([LEFT_BEFORE, AT_GATE, VOID])))
def test_all_are_cut_off(others: list[PeerStatus]) -> None:
    assert through(GENERATION, STEP, others) is False


@pytest.mark.parametrize("silent", [NO_WORD, OLD])
@given(others=st.lists(st.sampled_from([LEFT_BEFORE, AT_GATE, VOID])))
def test_who_said_nothing_yet_is_waited_for(silent: PeerStatus, others: list[PeerStatus]) -> None:
    assert through(GENERATION, STEP, [*others, silent]) is None


def _cut_off() -> None:
    raise RuntimeError("connection closed by peer")


def _finishes(mesh: Mesh, view: View) -> bool:
    own = PeerStatus("running", view.generation, STEP)
    try:
        come_through(mesh, view, own, _cut_off, LIMIT)
    except Interrupted:
        return False
    return True


def _fault(peers: Crew, view: View, then: Callable[[Mesh], None]) -> list[bool]:
    """The world of three ends; the first does something, the others are cut off at the gate."""
    first, *others = peers.all
    first.over(GenerationEnd(view.generation, "a fault", first.me.id, "fault"))
    with ThreadPoolExecutor(len(others)) as pool:
        found = [pool.submit(_finishes, mesh, view) for mesh in others]
        then(first)
        return [one.result(LIMIT) for one in found]


@pytest.mark.parametrize("step", [STEP, STEP + 1])
def test_those_at_the_gate_do_what_the_first_did(tmp_path: Path, step: int) -> None:
    with crew(tmp_path, 3, min_world=3) as peers:
        view = world(peers.several(3))
        found = _fault(
            peers, view, lambda mesh: mesh.say(PeerStatus("ready", view.generation, step))
        )
        assert found == [step > STEP] * 2


def test_who_dies_is_not_waited_for(tmp_path: Path) -> None:
    with crew(tmp_path, 3, min_world=3) as peers:
        view = world(peers.several(3))
        assert _fault(peers, view, lambda mesh: mesh.close()) == [False, False]


def test_an_error_in_a_world_that_goes_on_is_told(tmp_path: Path) -> None:
    with crew(tmp_path, 2, min_world=2) as peers:
        view = world(peers.several(2))
        own = PeerStatus("running", view.generation, STEP)
        with pytest.raises(RuntimeError, match="closed by peer"):
            come_through(peers.all[0], view, own, _cut_off, LIMIT)
