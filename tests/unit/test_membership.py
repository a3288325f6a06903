"""The membership by scripts of events: no socket, no thread, no clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from membership_scripts import SCRIPTS, Script

from slurm_resilience.mesh.events import (
    ConnectionClosed,
    ConnectionProven,
    MessageReceived,
    SeveralProven,
)
from slurm_resilience.mesh.messages import GenerationEnded
from slurm_resilience.mesh.model import GenerationEnd, Member, Peer, PeerStatus, Timing
from slurm_resilience.mesh.protocol.contacts import CONNECTION_MOVES, ConnectionState
from slurm_resilience.mesh.protocol.generation_state import STAGES, Move, Stage
from slurm_resilience.mesh.protocol.membership import MISFIT_SECONDS, Membership
from slurm_resilience.mesh.protocol.world_plan import WorldRules

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


def started_for(seats: int, incarnation: int = 0, core: int = 0) -> Membership:
    me = Peer("0", 0, incarnation, "n0", seats=seats)
    return Membership(me, WorldRules(seats, seats, core=core), Timing(), 0.0)


def stopped_at(membership: Membership, now: float) -> str:
    membership.tick(now)
    end = membership.side.standing.stopped
    return "" if end is None else end.reason


def test_nodes_that_were_started_for_worlds_of_other_sizes_are_told() -> None:
    """Each waited for ever for ranks that the other one did not have."""
    membership = started_for(4)
    membership.step(ConnectionProven(1, Peer("1", 1, 0, "n1", seats=2), PeerStatus(), True), 0.5)
    assert not stopped_at(membership, MISFIT_SECONDS)
    assert stopped_at(membership, MISFIT_SECONDS + 0.6) == (
        "n0 was started for a world of 4, n1 for one of 2: start all nodes with the same --nnodes "
        "and --nproc-per-node"
    )


def test_several_that_are_met_at_once_may_be_of_another_size() -> None:
    membership = started_for(4)
    peers = [Peer(str(seat), seat, 0, f"n{seat}", seats=seat) for seat in (2, 3)]
    members = tuple(Member(peer, PeerStatus()) for peer in peers)
    membership.step(SeveralProven((-1, -2), members), 0.5)
    told = stopped_at(membership, MISFIT_SECONDS + 0.6)
    assert "n0 was started for a world of 4, n2 for one of 2, n3 for one of 3:" in told


def test_one_that_belongs_to_a_running_training_goes_on() -> None:
    membership = started_for(4, incarnation=1)
    misfit = ConnectionProven(1, Peer("1", 1, 0, "n1", seats=2), PeerStatus(), True)
    membership.step(misfit, 0.5)
    running = PeerStatus("running", generation=7)
    membership.step(ConnectionProven(2, Peer("2", 2, 0, "n2", seats=4), running, True), 5.0)
    assert not stopped_at(membership, MISFIT_SECONDS + 1.0)


@pytest.mark.parametrize(("left_after", "stops"), [(0.4, False), (0.9, True)])
def test_one_that_leaves_soon_stops_no_other(left_after: float, stops: bool) -> None:
    """All of a training may have died, so that it waits for its last rank without a world."""
    membership = started_for(4, incarnation=1)
    membership.step(ConnectionProven(1, Peer("1", 1, 0, "n1", seats=2), PeerStatus(), True), 0.0)
    membership.step(ConnectionClosed(1, "closed", "closed"), left_after * MISFIT_SECONDS)
    assert bool(stopped_at(membership, MISFIT_SECONDS + 0.1)) == stops


def test_a_running_training_goes_on_beside_one_of_another_size() -> None:
    membership = started_for(1)
    assert not stopped_at(membership, 0.0)
    assert membership.side.invitation() is not None
    misfit = Peer("1", 0, 5, "n1", seats=2)
    membership.step(ConnectionProven(1, misfit, PeerStatus(), True), 0.5)
    end = GenerationEnded(GenerationEnd(0, "it gives up", "1", "stop"))
    membership.step(MessageReceived(1, "1", "1", end, 0.0), 0.6)
    assert not stopped_at(membership, 100.0)
    assert not membership.side.standing.evicted, "it takes no seat"


def test_ranks_of_an_elastic_job_may_be_told_other_sizes() -> None:
    membership = started_for(4, core=2)
    membership.step(ConnectionProven(1, Peer("1", 1, 0, "n1", seats=2), PeerStatus(), True), 0.5)
    assert not stopped_at(membership, MISFIT_SECONDS + 1.0)
