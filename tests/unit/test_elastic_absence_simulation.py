"""Simulated runs of an elastic step whose supervisor stands still: it was stopped, or its machine
slept.

A run is made from its seed alone. Its Slurm and its training go on meanwhile; the first look
afterwards sees them as they were before, and the thread that asks Slurm has done nothing.
"""

from __future__ import annotations

import random

import pytest

from slurm_resilience.config import ElasticSettings
from slurm_resilience.mesh.model import Peer
from slurm_resilience.resume.elastic import size_events as ev
from slurm_resilience.resume.elastic.awake_time import AwakeTime
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.node_group import GroupState
from slurm_resilience.resume.elastic.size_plan import SizePlan
from slurm_resilience.resume.live_step.live_events import FaultyNode, Tick, TrainingSeen

RUNS = 150
RUN_SECONDS = 4000.0
STARTS_SECONDS = 2.0
"""From a request until Slurm gives nodes, where it has any."""


class Rank:
    """A rank that was started, on a node of a companion."""

    def __init__(self, steps_at: float) -> None:
        self.steps_at = steps_at
        self.asked_at = float("inf")
        """It was told to leave, and goes soon."""


class Simulation:
    """A plan, the time by which it counts, a Slurm and a training."""

    def __init__(self, seed: int, counts: bool = True) -> None:
        """
        Args:
            seed: decides everything.
            counts: limits are counted without the absences.
        """
        self.random = random.Random(seed)
        settings = ElasticSettings(timeout=self.random.choice((60.0, 600.0)), snooze=5.0)
        self.settings = settings
        groups = (1,) * self.random.randint(1, 3)
        self.plan = SizePlan(ElasticSize(2, 2, groups, (), settings), 1)
        self.time = AwakeTime() if counts else None
        self.now = 0.0
        self.blind_until = 0.0
        """Until then all is seen as it was before the last absence."""
        self.shown: TrainingSeen | None = None
        self.orders: list[ev.AskForGroup | ev.AskGroupToLeave | ev.GiveBack] = []
        self.events: list[ev.SizeEvent] = []
        self.granted_at: dict[int, float] = {}
        self.group_of: dict[int, int] = {}
        self.ranks: dict[int, Rank] = {}
        """By the srun's number."""
        self.step_of: dict[int, int] = {}
        """The number of the srun of each group that has one."""
        self.next_number = 100
        self.awake = 0.0
        """Seconds in which the supervisor was there."""
        self.sick_at = self.random.uniform(100.0, 2000.0) if self.random.random() < 0.5 else 1e9
        self.sick_awake: float | None = None
        self.absences = sorted(
            (self.random.uniform(1.0, 2500.0), self.random.uniform(6.0, 1500.0)) for _ in range(3)
        )
        self.resizes = sorted(self.random.uniform(100.0, 3000.0) for _ in range(2))

    def run(self) -> None:
        while self.now < RUN_SECONDS:
            pause = self.random.uniform(0.2, 1.5)
            self.now += pause
            self.awake += pause
            if self.absences and self.now >= self.absences[0][0]:
                self.now += self.absences.pop(0)[1]
                self.blind_until = self.now + self.random.uniform(0.1, 2.0)
            self.look()

    def look(self) -> None:
        """Tell all that is new, as the supervisor does; then have the orders carried out."""
        self.look_at_sick_node()
        self.tell(self.training_seen())
        for number in [n for n, rank in self.ranks.items() if self.now > rank.asked_at + 3.0]:
            del self.ranks[number]
            if self.now >= self.blind_until:
                self.events.append(ev.GroupStepEnded(number, 0))
        events, self.events = self.events, []
        for event in events:
            self.tell(event)
        if self.resizes and self.now >= self.resizes[0]:
            self.resizes.pop(0)
            self.tell(ev.TargetSet(self.random.choice(self.plan._size.reached), "ann"))
        self.tell(Tick())
        if self.now >= self.blind_until:
            self.carry_out()

    def look_at_sick_node(self) -> None:
        if self.now < self.sick_at:
            return
        if self.sick_awake is None:
            self.sick_awake = self.awake
        self.tell(ev.NodesSick((FaultyNode("n2", "it is hot", False),)))
        stands_in = self.plan.groups[-1].state is GroupState.IN
        if self.plan.may_leave("n2", self.at()) and not stands_in:
            waited = self.awake - self.sick_awake
            assert waited > 0.9 * self.settings.evacuation_wait, f"n2 is left after {waited:.0f} s"

    def training_seen(self) -> TrainingSeen:
        if self.now < self.blind_until and self.shown is not None:
            return self.shown
        peers = [Peer(id=f"{seat}", seat=seat, node=f"n{seat + 1}") for seat in (0, 1)]
        for group in self.plan.groups:
            rank = self.ranks.get(self.step_of.get(group.number, 0))
            if rank is not None and rank.steps_at <= self.now and group.holds_nodes:
                seat = group.ranks[0]
                peers.append(Peer(id=f"{seat}@{group.steps}", seat=seat, node=group.nodes[0]))
        seats = tuple(sorted(peer.seat for peer in peers))
        self.shown = TrainingSeen(1, seats, 7, tuple(peers))
        return self.shown

    def at(self) -> float:
        """Return the time by which the plan counts."""
        return self.now if self.time is None else self.time.at(self.now)

    def tell(self, event: object) -> None:
        for action in self.plan.step(event, self.at()):  # type: ignore[arg-type]
            match action:
                case ev.AskForGroup() | ev.AskGroupToLeave():
                    self.orders.append(action)
                case ev.GiveBack():
                    self.give_back(action)
                case ev.StartGroup(group):
                    self.next_number += 1
                    comes = self.random.uniform(1.0, 0.8 * self.settings.timeout)
                    self.ranks[self.next_number] = Rank(self.now + comes)
                    self.step_of[group] = self.next_number
                    self.tell(ev.GroupStarted(group, (self.next_number,)))

    def give_back(self, action: ev.GiveBack) -> None:
        """Kill the ranks of a companion: they have gone, or were waited for."""
        for number in action.steps:
            rank = self.ranks.pop(number, None)
            if rank is None:
                continue
            asked = rank.asked_at <= self.now
            assert asked or rank.steps_at > self.now, f"ranks that step are killed at {self.now}"
        self.orders.append(action)

    def carry_out(self) -> None:
        """Do what the thread does that asks Slurm."""
        orders, self.orders = self.orders, []
        for order in orders:
            match order:
                case ev.AskForGroup(group):
                    self.next_number += 1
                    self.group_of[self.next_number] = group
                    self.granted_at[self.next_number] = self.now + STARTS_SECONDS
                    self.events.append(ev.GroupAsked(group, self.next_number))
                case ev.AskGroupToLeave(_, steps):
                    for number in steps:
                        if number in self.ranks:
                            rank = self.ranks[number]
                            rank.asked_at = min(rank.asked_at, self.now)
                case ev.GiveBack(_, companion):
                    self.granted_at.pop(companion, None)
                    del self.group_of[companion]
        for companion in [job for job, at in self.granted_at.items() if at <= self.now]:
            del self.granted_at[companion]
            group = self.group_of[companion]
            self.events.append(ev.CompanionSeen(group, companion, "RUNNING", (f"g{companion}",)))


def test_a_supervisor_that_stood_still_takes_nothing_for_late() -> None:
    for seed in range(RUNS):
        Simulation(seed).run()


def test_one_that_counts_the_time_of_its_absence_is_found() -> None:
    found = set()
    for seed in range(RUNS):
        try:
            Simulation(seed, counts=False).run()
        except AssertionError as error:
            found.add(str(error).split()[0])
    assert found == {"ranks", "n2"}


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_a_short_pause_is_no_absence(seconds: float) -> None:
    time = AwakeTime()
    for number in range(5):
        assert time.at(number * seconds) == number * seconds
