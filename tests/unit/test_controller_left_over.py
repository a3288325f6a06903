"""A drain for "Kill task failed": what is left is ended, the node resumed, no fault counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm
from worlds import NOW, FakeClock, actions, agent, config, decision, finding, incident, node, world

from slurm_resilience.controller import actions as act
from slurm_resilience.controller.act.left_over_acts import LeftOverActs
from slurm_resilience.controller.act.reporting import Reporter
from slurm_resilience.controller.actions import ClearLeftOver
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import LEFT_OVER_REMAINS
from slurm_resilience.errors import WireError
from slurm_resilience.wire.messages import EndLeftOver, LeftOverEnded, NodeAnswer

REASON = "Kill task failed"
DRAINED = node("n1", "IDLE+DRAIN", REASON)
WELL = {"agents": (agent(),)}


def test_it_is_cleared_and_no_fault_of_the_machine() -> None:
    said = decision(world(DRAINED, **WELL))
    assert [type(action) for action in said.actions] == [ClearLeftOver]
    assert said.notes == ()


@pytest.mark.parametrize(
    "seen",
    [
        world(node("n1", "IDLE+DRAIN", REASON, reason_by="alice"), **WELL),
        world(node("n1", "IDLE+DRAIN", f"{REASON}, look at it"), **WELL),
        world(node("n1", "IDLE+DRAIN", REASON, reason_unclear=True), **WELL),
        world(node("n1", "MIXED+DRAIN", REASON), **WELL),
        world(node("n1", "DOWN+DRAIN", REASON), **WELL),
        world(node("n1", "IDLE", REASON), **WELL),
        world(DRAINED, agents=(agent(silence=3.0),)),
        world(DRAINED, agents=(agent(reported=False),)),
        world(DRAINED, agents=(agent(findings=(finding(),)),)),
        world(DRAINED, incidents=(incident(),), **WELL),
        world(DRAINED, left_overs={"n1": (1, NOW - 30)}, **WELL),
        world(DRAINED, paused="maintenance", **WELL),
    ],
)
def test_it_is_left_alone_where_anything_else_is_the_matter(seen: Any) -> None:
    assert actions(seen, ClearLeftOver) == []


@pytest.mark.parametrize("mode", ["none", "observe"])
def test_it_is_left_alone_in_the_other_modes(mode: str) -> None:
    assert actions(world(DRAINED, **WELL), ClearLeftOver, config(recovery={"mode": mode})) == []


def test_after_three_tries_a_person_must_look() -> None:
    again = world(DRAINED, left_overs={"n1": (2, NOW - 61)}, **WELL)
    assert len(actions(again, ClearLeftOver)) == 1
    given_up = world(DRAINED, left_overs={"n1": (3, NOW - 61)}, **WELL)
    assert actions(given_up, ClearLeftOver) == []
    (alarm,) = actions(given_up, act.RaiseAlarm)
    assert "could not be ended 3 times" in alarm.text


class Site:
    """The acts on a fake Slurm; a node answers when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.slurm, self.clock = FakeSlurm(2), FakeClock()
        self.journal = Journal(folder / "journal.db")
        self.asked: list[tuple[Any, Any]] = []
        self.refuses = ""
        reporter = Reporter(self.journal, self.clock)
        self.acts = LeftOverActs(self.slurm, reporter, self.clock, self.ask, lambda: None)
        self.slurm.set_node(["n1"], state="drain", reason=REASON)

    def ask(self, node: str, kind: str, body: Any, seconds: float, done: Any) -> None:
        if self.refuses:
            raise WireError(self.refuses)
        self.asked.append((msgspec.msgpack.decode(body, type=EndLeftOver), done))

    def clear(self) -> None:
        seen = world(*self.slurm.nodes(), **WELL)
        self.acts.clear(seen, ClearLeftOver("n1"))

    def answer(self, *left: str) -> None:
        body = msgspec.msgpack.encode(LeftOverEnded(("41 sleep (alice, sleeping)",), left))
        self.asked[-1][1](NodeAnswer(1, msgspec.Raw(body)))

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.journal.events("n1")][::-1]

    def is_drained(self) -> bool:
        return self.slurm.node("n1").is_drain


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_it_is_ended_verified_and_resumed_once(site: Site) -> None:
    site.clear()
    site.clear()
    assert len(site.asked) == 1 and site.is_drained()
    site.answer()
    assert site.is_drained()
    site.clear()
    assert not site.is_drained()
    assert site.kinds() == ["left-over", "left-over-ended"]
    assert "41 sleep (alice" in site.journal.events("n1")[0]["text"]
    assert site.journal.incidents(open_only=False) == []


def test_what_cannot_be_ended_keeps_the_node_out(site: Site) -> None:
    site.clear()
    site.answer("42 python (alice, disk-sleep)")
    site.clear()
    assert site.is_drained() and site.kinds() == ["left-over", LEFT_OVER_REMAINS]
    assert site.journal.left_overs(NOW - 1) == {"n1": (1, NOW)}


def test_a_person_who_takes_the_node_meanwhile_has_it(site: Site) -> None:
    site.clear()
    site.answer()
    seen = world(*site.slurm.nodes(), **WELL)
    site.slurm.set_node(["n1"], state="drain", reason="bad NIC")
    site.acts.clear(seen, ClearLeftOver("n1"))
    assert site.is_drained() and site.slurm.node("n1").reason == "bad NIC"


def test_a_node_that_cannot_be_asked_stays_out(site: Site) -> None:
    site.refuses = "the sresd of n1 is not connected"
    site.clear()
    site.clear()
    assert site.is_drained() and site.kinds()[-1] == LEFT_OVER_REMAINS


def test_an_answer_that_never_comes_is_asked_for_again(site: Site) -> None:
    site.clear()
    site.clock.pass_time(31)
    site.clear()
    assert len(site.asked) == 2
