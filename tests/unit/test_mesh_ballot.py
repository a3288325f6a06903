"""The worlds that may go on, as a voter or a lead knows them."""

from __future__ import annotations

from slurm_resilience.mesh.messages import Vote
from slurm_resilience.mesh.model import Member, Peer, PeerStatus, View, generation_number
from slurm_resilience.mesh.protocol.ballot import Ballot, PossibleWorlds


def view(counter: int, lead: int, *seats: int) -> View:
    members = tuple(Member(Peer(str(seat), seat), PeerStatus()) for seat in seats)
    return View(generation_number(counter, lead), members, seats=4)


OLDEST, OLDER, NEWER = view(1, 0, 0, 1, 2), view(2, 1, 1, 2), view(3, 0, 0, 2)


def known(worked: View, *newer: View) -> PossibleWorlds:
    worlds = PossibleWorlds()
    worlds.learn(worked)
    for one in newer:
        worlds.add(one)
    return worlds


def test_a_world_that_worked_ends_all_older_ones() -> None:
    worlds = known(OLDEST, NEWER, OLDER)
    assert worlds.all() == (OLDEST, OLDER, NEWER)
    worlds.note_worked(OLDER.generation)
    assert (worlds.worked, worlds.all()) == (OLDER, (OLDER, NEWER))
    worlds.learn(OLDEST)
    worlds.add(OLDEST)
    worlds.note_worked(view(9, 0, 0).generation)
    assert worlds.all() == (OLDER, NEWER)
    assert worlds.members() == {"0", "1", "2"}


def test_only_a_member_that_voted_for_a_newer_world_makes_one_void() -> None:
    worlds = known(OLDEST, OLDER)
    number, worked = NEWER.generation, OLDEST.generation
    worlds.drop_void("0", number, (worked,), worked)  # no member of it
    worlds.drop_void("2", number, (worked, OLDER.generation), worked)  # it adopted it
    worlds.drop_void("2", OLDER.generation, (worked,), worked)  # it may adopt it yet
    assert worlds.all() == (OLDEST, OLDER)
    worlds.drop_void("2", number, (worked,), worked)
    assert worlds.all() == (OLDEST,)


def test_a_ballot_is_full_when_all_members_voted_for_it() -> None:
    ballot = Ballot(NEWER, "0", 0.0, 0.5)
    assert ballot.add({"0", "1", "2"}) == {"1", "2"}
    assert not ballot.add({"1"})
    ballot.count("1", Vote(NEWER.generation, True, NEWER.generation))
    assert (ballot.is_full, ballot.missing) == (False, {"2"})
    ballot.count("2", Vote(NEWER.generation, False, 7))
    assert (ballot.is_full, ballot.refused, ballot.promised) == (False, True, NEWER.generation)
    ballot.count("2", Vote(NEWER.generation, True, NEWER.generation))
    assert ballot.is_full


def test_votes_are_asked_for_ever_less_often() -> None:
    ballot, now, waits = Ballot(NEWER, "0", 0.0, 0.5), 0.0, []
    ballot.add({"1", "2"})
    for _ in range(5):
        now = ballot.again_at
        ballot.ask_again(now, all_of_them=True)
        waits.append(ballot.again_at - now)
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert ballot.missing == {"1", "2"}
