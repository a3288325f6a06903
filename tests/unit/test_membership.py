"""The membership by scripts of events: no socket, no thread, no clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from membership_scripts import SCRIPTS, Script

from slurm_resilience.mesh.protocol.contacts import CONNECTION_MOVES, ConnectionState
from slurm_resilience.mesh.protocol.generation_state import STAGES, Move, Stage

FILES = sorted(SCRIPTS.glob("*.toml"))


def test_there_are_scripts() -> None:
    assert len(FILES) >= 15


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_script(file: Path) -> None:
    script = Script(file)
    expected = [(s["at"], s["event"], s["effects"]) for s in script.data["step"]]
    assert script.play() == expected, script.data["title"]


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("waiting_is_told", "1 of 2 ranks were there, and at least 2 are needed"),
        ("too_late", "1 of 2 ranks were there, and at least 2 are needed"),
        ("cut_minority", ""),  # the others may go on behind the cut
        ("member_dies", ""),  # enough are left
        ("newcomer_beside_done", ""),  # the training is over, and it is told soon
        ("hung_beside_a_living_world", ""),
    ],
)
def test_too_few_ranks_are_told_where_no_others_may_go_on(name: str, lacking: str) -> None:
    script = Script(SCRIPTS / f"{name}.toml")
    script.play()
    assert script.membership.side.shortage() == lacking


def test_every_stage_is_reached_and_left() -> None:
    assert set(STAGES.values()) | {Stage.NONE} == set(Stage)
    assert {stage for stage, _ in STAGES} == set(Stage)
    assert {move for _, move in STAGES} == set(Move)


def test_a_main_thread_is_out_before_it_enters_the_next_world() -> None:
    for (stage, move), after in STAGES.items():
        if stage in (Stage.ENTERED, Stage.ENDING, Stage.LATE) and after in (
            Stage.NONE,
            Stage.FORMED,
            Stage.OVER,
            Stage.RETURNED,
        ):
            assert move is Move.LEAVE, (stage, move)


def test_a_closed_connection_stays_closed() -> None:
    assert CONNECTION_MOVES[ConnectionState.CLOSED] == frozenset()
    again = {state for state, moves in CONNECTION_MOVES.items() if ConnectionState.CURRENT in moves}
    assert again == {ConnectionState.SUPERSEDED}
