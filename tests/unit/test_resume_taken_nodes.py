"""Nodes that a person took out of the job, told from those that are lost in any other way."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.model import Job, Node
from slurm_resilience.resume.allocation.taken_nodes import taken_by_person, words_on
from slurm_resilience.slurm.slurmd_port import PortsSeen

BOOTED = {"n3": "monday"}
WELL = Node("n3", "IDLE", boot_time="monday")


class Site:
    """Slurm and sresctld, and all that is known of a job of which n3 is none any more."""

    def __init__(self) -> None:
        self.node: Node | None = WELL
        self.node_later: Node | None = WELL
        self.seen = Job(7, 1000, "RUNNING", nodes=("n1", "n2"))
        self.looks, self.away = 0, False
        self.answering = frozenset({"n3"})
        self.doubtful: dict[str, str] = {}
        self.faulty: dict[str, str] = {}
        self.allocation = SimpleNamespace(
            id=7,
            job=self.seen,
            companions=SimpleNamespace(nodes=()),
            left_nodes=set[str](),
            claims=SimpleNamespace(are_shared=False),
        )

    def job(self, number: int) -> Job:
        if self.away:
            raise SlurmUnreachable("Unable to contact slurm controller")
        return self.seen

    def nodes(self) -> tuple[Node, ...]:
        self.looks += 1
        node = self.node if self.looks == 1 else self.node_later
        return (node,) if node is not None else ()

    def look_at_ports(self, nodes: Iterable[Node]) -> PortsSeen:
        return PortsSeen(self.answering, frozenset())

    def wait(self, event: Event, seconds: float) -> bool:
        return event.is_set()

    def taken(self) -> tuple[str, ...]:
        link = SimpleNamespace(doubts=lambda names: self.doubtful, faulty=lambda: self.faulty)
        context: Any = SimpleNamespace(
            allocation=self.allocation, client=self, clock=self, link=link, host_calls=self
        )
        return taken_by_person(context, BOOTED, ("n2", "n3"), Event())


def test_a_node_that_is_well_and_out_of_the_job_was_taken_by_a_person() -> None:
    assert Site().taken() == ("n3",)


@pytest.mark.parametrize(
    "node",
    [
        None,
        Node("n3", "DOWN", boot_time="monday"),
        Node("n3", "IDLE", frozenset({"DRAIN"}), boot_time="monday"),
        Node("n3", "IDLE", frozenset({"FAIL"}), boot_time="monday"),
        Node("n3", "IDLE", frozenset({"NOT_RESPONDING"}), boot_time="monday"),
        Node("n3", "IDLE", reason="Action:Replace", boot_time="monday"),
        Node("n3", "IDLE", boot_time="tuesday"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_one_that_anything_speaks_against_was_not(node: Node | None, later: bool) -> None:
    site = Site()
    site.node_later = node
    site.node = WELL if later else node
    assert site.taken() == ()


def test_where_it_cannot_be_told_it_is_as_ever() -> None:
    away, silent, doubted, judged, shared, left, held, requeued = (Site() for _ in range(8))
    away.away = True
    silent.answering = frozenset()  # it has lost its power, and nothing has noticed it yet
    doubted.doubtful = {"n3": "no beat for 2 s"}
    judged.faulty = {"n3": "no beat for 9 s"}
    shared.allocation.claims.are_shared = True  # the other one exchanges nodes as well
    left.allocation.left_nodes.add("n3")
    held.allocation.companions.nodes = ("n3",)
    requeued.seen = Job(7, 1000, "RUNNING", nodes=("n1", "n2"), restarts=1)
    for site in (away, silent, doubted, judged, shared, left, held, requeued):
        assert site.taken() == ()


def test_the_words_say_what_to_do() -> None:
    assert "n3 is well" in words_on(("n3",), 7) and "submit the job again" in words_on(("n3",), 7)
    assert "n[3-4] are well" in words_on(("n4", "n3"), 7)
