"""Whole worlds of the mesh's protocol on a simulated clock: what they cost, and too few cores."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.mesh.messages import Bundle, Reachable, Relayed, Unreachable
from slurm_resilience.mesh.model import Member, Peer, PeerStatus
from slurm_resilience.mesh.protocol.bundling import LinkBundle, waits_of

FILE = Path(__file__).parents[2] / "scripts" / "bench_parts" / "mesh_crowd.py"


@pytest.fixture(scope="module")
def crowds() -> Any:
    spec = importlib.util.spec_from_file_location("mesh_crowd", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mesh_crowd"] = module
    spec.loader.exec_module(module)
    return module


def frames_of_a_rank(crowds: Any, ranks: int) -> float:
    crowd = crowds.Crowd(ranks)
    assert crowd.run(crowd.is_whole, 30.0)
    return float(crowd.frames()) / ranks


def test_the_frames_of_a_rank_hardly_grow_with_the_world(crowds: Any) -> None:
    few, many = (frames_of_a_rank(crowds, ranks) for ranks in (16, 128))
    assert many < 4 * few, f"{few:.0f} frames a rank in a world of 16, {many:.0f} in one of 128"


def test_a_death_costs_a_rank_as_much_in_a_large_world(crowds: Any) -> None:
    cost = []
    for ranks in (16, 128):
        crowd = crowds.Crowd(ranks)
        assert crowd.run(crowd.is_whole, 30.0)
        before = crowd.frames()
        crowd.kill(crowd.living()[0])
        assert crowd.run(crowd.is_whole, 30.0)
        cost.append((crowd.frames() - before) / ranks)
    assert cost[1] < 3 * cost[0]


@pytest.mark.parametrize("ranks", [32, 128])
def test_a_death_in_a_new_world_costs_no_beat(crowds: Any, ranks: int) -> None:
    """A rank of another node that does not know yet who leads now asks for votes as well."""
    crowd = crowds.Crowd(ranks)
    assert crowd.run(crowd.is_whole, 30.0)
    crowd.kill(crowd.living()[0])
    assert crowd.run(crowd.is_whole, 0.4)


def test_too_few_cores_make_a_new_world_slow_and_end_no_rank(crowds: Any) -> None:
    crowd = crowds.Crowd(64, cores=2, costs=crowds.Costs().times(20))
    assert crowd.run(crowd.is_whole, 60.0)
    crowd.kill(crowd.living()[0])
    assert crowd.run(crowd.is_whole, 60.0), crowd.given_up[:3]
    assert not crowd.given_up


def test_a_process_uses_what_its_mesh_and_its_protocol_cost(crowds: Any) -> None:
    free = crowds.Costs(0.0, 0.0, 0.0)
    crowd = crowds.Crowd(16, costs=free._replace(start=0.02, protocol=3.0))
    assert crowd.run(crowd.is_whole, 30.0)
    for process in crowd.living():
        assert process.used == pytest.approx(0.02 + 3.0 * process.seconds)
    assert crowd.now > 0.02


# -- what waits for the end of a turn ----------------------------------------------------------


def words(
    sources: str, text: bytes, *targets: str, quiet: bool = False, calm: bool = False
) -> Relayed:
    """Return what each of these sources, of one letter each, says."""
    return Relayed(tuple(sources), targets, text, quiet, calm)


def taken(box: LinkBundle, *reached: str) -> tuple[Any, ...]:
    found = box.take(reached)
    return found.messages if isinstance(found, Bundle) else (found,)


def test_what_is_said_to_many_goes_once() -> None:
    box = LinkBundle()
    for target in "bcd":
        box.add(words("a", b"hello", target), 0.0)
    assert taken(box, "b", "c", "d", "e") == (words("a", b"hello", "b", "c", "d"),)


def test_what_is_said_to_all_that_are_reached_names_none() -> None:
    box = LinkBundle()
    box.add(words("a", b"hello", "c", "b"), 0.0)
    assert taken(box, "b", "c") == (words("a", b"hello"),)


def test_no_message_overtakes_another_on_its_way() -> None:
    box = LinkBundle()
    box.add(words("a", b"one", "b"), 0.0)
    box.add(words("a", b"two", "c"), 0.0)
    box.add(words("a", b"one", "c"), 0.0)
    assert taken(box, "b", "c", "d") == (
        words("a", b"one", "b"),
        words("a", b"two", "c"),
        words("a", b"one", "c"),
    )


def test_what_many_say_in_the_same_words_goes_once() -> None:
    box = LinkBundle()
    for source in "abc":
        box.add(words(source, b"ended"), 0.0)
        box.add(words(source, b"ready"), 0.0)
    assert taken(box, "x", "y") == (words("abc", b"ended"), words("abc", b"ready"))


def test_no_source_overtakes_itself_among_many() -> None:
    box = LinkBundle()
    box.add(words("a", b"ready"), 0.0)
    box.add(words("b", b"running"), 0.0)
    box.add(words("b", b"ready"), 0.0)
    assert taken(box, "x", "y") == (
        words("a", b"ready"),
        words("b", b"running"),
        words("b", b"ready"),
    )


def test_a_source_says_nothing_before_it_is_known() -> None:
    new = Reachable((1, 0), (Member(Peer("b", 1), PeerStatus()),))
    box = LinkBundle()
    box.add(words("a", b"ready"), 0.0)
    box.add(new, 0.0)
    box.add(words("b", b"ready"), 0.0)
    assert taken(box, "x", "y") == (words("a", b"ready"), new, words("b", b"ready"))


def test_what_is_to_be_passed_on_stays_apart() -> None:
    box = LinkBundle(apart="a")
    for source in "bac":
        box.add(words(source, b"ready"), 0.0)
    assert taken(box, "x", "y") == (words("bc", b"ready"), words("a", b"ready"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([b"one", b"two", b"three"]),
            st.lists(st.sampled_from("xyz"), unique=True, max_size=3),
        ),
        max_size=30,
    )
)
def test_each_target_hears_each_source_in_order(said: list[tuple[str, bytes, list[str]]]) -> None:
    """Each target reads what each source has said to it, in order, joined or not."""
    box = LinkBundle(apart="a")
    for source, text, targets in said:
        box.add(words(source, text, *targets), 0.0)
    read = taken(box, "x", "y", "z", "w") if said else ()
    for source, target in itertools.product("abc", "xyzw"):
        expected = [t for s, t, to in said if s == source and (not to or target in to)]
        found = [m.body for m in read if source in m.sources and target in (m.targets or "xyzw")]
        assert found == expected


def test_members_of_one_speaker_are_told_of_together() -> None:
    one, two = (Member(Peer(name, seat), PeerStatus()) for seat, name in enumerate("ab"))
    box = LinkBundle()
    box.add(Reachable((1, 0), (one,)), 0.0)
    box.add(Reachable((1, 0), (two,)), 0.0)
    box.add(Unreachable(("a",), "lost"), 0.0)
    box.add(Reachable((1, 0), (one,)), 0.0)
    assert taken(box) == (
        Reachable((1, 0), (one, two)),
        Unreachable(("a",), "lost"),
        Reachable((1, 0), (one,)),
    )


MEMBER = Member(Peer("z", 9), PeerStatus())
WAITS = waits_of(quiet=3.0, calm=2.0, gathers=1.0)
BEAT = words("a", b"beat", quiet=True)
RUNNING = words("a", b"running", calm=True)
WORD = words("a", b"word")
REACHED = Reachable((1, 0), (MEMBER,))
LOST = Unreachable(("z",), "lost")


@pytest.mark.parametrize(
    ("messages", "seconds"),
    [
        ((BEAT,), 3.0),
        ((RUNNING,), 2.0),
        ((RUNNING, RUNNING), 2.0),
        ((WORD,), 0.0),
        ((RUNNING, WORD), 0.0),
        ((WORD, RUNNING), 0.0),
        ((REACHED,), 1.0),
        ((REACHED, RUNNING), 1.0),
        ((RUNNING, REACHED), 1.0),
        ((REACHED, WORD), 1.0),
        ((WORD, REACHED), 0.0),
        ((REACHED, LOST), 0.0),
        ((LOST, REACHED), 0.0),
        ((REACHED, LOST, REACHED), 0.0),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_what_has_others_go_on_does_not_wait(
    messages: tuple[Any, ...], seconds: float, together: bool
) -> None:
    box = LinkBundle()
    for message in messages:
        later = box if together else LinkBundle()
        later.add(message, 5.0)
        if later is not box:
            box.extend(later)
    assert box.since + WAITS[box.haste] == 5.0 + seconds


def test_heartbeats_are_sent_as_such() -> None:
    box = LinkBundle()
    box.add(BEAT, 1.0)
    found = box.take(())
    assert isinstance(found, Bundle)
    assert found.quiet
    box.add(WORD, 2.0)
    assert isinstance(box.take(()), Bundle)
    assert not box.take(()).quiet
