"""Simulated runs of a living step: nodes and tasks die at any moment, every answer comes late.

A run is made from its seed alone. What may never happen, and what always has to, is checked at each
action and at the end.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from slurm_resilience.config import ResumeSettings
from slurm_resilience.mesh.model import Peer
from slurm_resilience.resume.decide.plan import Plan
from slurm_resilience.resume.live_step.live_events import (
    Action,
    AskToLeave,
    EndAttempt,
    EndJoin,
    EndSteps,
    Event,
    FaultyNode,
    FoundNodes,
    JoinFailed,
    JoinStarted,
    LeaveJudged,
    LeaveNode,
    NodesFaulty,
    SearchEnded,
    SearchKind,
    StartJoin,
    StartSearch,
    StepsEnded,
    StopSearches,
    TasksDied,
    Tick,
    TrainingEnded,
    TrainingSeen,
    UserEnded,
)
from slurm_resilience.resume.live_step.live_plan import (
    JOIN_SECONDS,
    LivePlan,
    LiveStepState,
)
from slurm_resilience.resume.live_step.losses import LostSeatState
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatMap
from slurm_resilience.resume.live_step.stall_watch import steps_without

LIMITS = ResumeSettings(swap_wait=600.0)
FAULT_SECONDS = 300.0
"""Faults happen in the beginning of a run."""
RUN_SECONDS = 20_000.0
"""Enough for as many join steps as are tried, each until its limit."""
LONGEST_WAIT_SECONDS = 4 * (LIMITS.swap_wait + 2 * JOIN_SECONDS)
"""No seat steps for longer than this, unless the step is over."""
SETTLED = {LostSeatState.FILLED, LostSeatState.EMPTY, LostSeatState.LOST_AGAIN}


@dataclass
class Process:
    """One rank."""

    name: str
    seat: int
    incarnation: int
    node: str
    step: int
    connected: bool = True
    alive: bool = True


@dataclass
class Srun:
    """One step."""

    number: int
    seats: tuple[int, ...]
    code: int = 0
    running: bool = True
    ended_by_us: bool = False
    died_untold: set[int] = field(default_factory=set)


class Simulation:
    """A training, its sruns and Slurm, around one plan."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        nodes = self.random.randint(2, 5)
        per_node = self.random.choice((1, 2))
        per_task = self.random.choice((1, per_node))
        slots = tuple(
            NodeSlot(rank, f"n{rank}", tuple(range(rank * per_node, (rank + 1) * per_node)))
            for rank in range(nodes)
        )
        self.seats = nodes * per_node
        self.min_world = self.random.randint(1, self.seats)
        self.plan = LivePlan(SeatMap(slots, self.seats, per_task), LIMITS)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.sruns = {0: Srun(0, tuple(range(self.seats)))}
        self.processes = [
            Process(f"{seat}.0", seat, 0, slot.node, 0) for slot in slots for seat in slot.seats
        ]
        self.left_nodes: dict[str, int] = {}
        """Processes on them from before this many processes were there do not count."""
        self.faulty: dict[str, FaultyNode] = {}
        self.spare = self.random.choice((0, 1, 20))
        self.generation = 1
        self.members = {process.name for process in self.processes}
        self.training_step = 0
        self.searches: dict[SearchKind, bool] = {}
        self.end: EndAttempt | None = None
        self.ended_at = 0.0
        self.user_at: float | None = None
        self.waiting_since: float | None = None
        self.trace: list[str] = []

    # -- running ------------------------------------------------------------------------------

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (self.now + seconds, self.number, call))

    def run(self) -> None:
        self.later(0.0, self.look)
        self.later(0.0, self.train)
        for _ in range(self.random.randint(0, 8)):
            self.later(self.random.uniform(0.0, FAULT_SECONDS), self.fault)
        while self.queue and self.end is None and self.now < RUN_SECONDS:
            self.now, _, call = heapq.heappop(self.queue)
            call()

    def tell(self, event: Event) -> None:
        if not isinstance(event, Tick | TrainingSeen):
            self.trace.append(f"{self.now:.1f} {event}")
        for action in self.plan.step(event, self.now):
            if type(action).__name__[:3] != "Say":
                self.trace.append(f"{self.now:.1f}    → {type(action).__name__}")
            self.do(action)

    def look(self) -> None:
        """One look of the supervisor; what it sees may be old."""
        faulty = tuple(f for f in self.faulty.values() if f.node in self.plan.seat_map.nodes)
        peers = tuple(
            Peer(p.name, p.seat, p.incarnation, p.node)
            for p in self.processes
            if p.connected and (p.alive or self.random.random() < 0.3)
        )
        running = tuple(sorted({p.seat for p in self.processes if p.name in self.members}))
        seen = TrainingSeen(self.generation, running, self.training_step, peers)
        self.tell(seen)
        if faulty:
            self.tell(NodesFaulty(faulty))
        if not any(srun.running for srun in self.sruns.values()):
            self.tell(StepsEnded({srun.number: srun.code for srun in self.sruns.values()}))
        for srun in self.sruns.values():
            if srun.died_untold and not srun.ended_by_us:
                tasks = tuple(sorted(srun.died_untold))
                srun.died_untold.clear()
                self.tell(TasksDied(srun.number, tasks, "Killed"))
        if self.random.random() < 0.5:
            self.tell(seen)
        self.tell(Tick())
        self.check_wait(seen)
        # Far apart when nothing goes on any more: else a run is long.
        pause = 1.0 if self.now < 1.2 * FAULT_SECONDS else 60.0
        self.later(self.random.uniform(0.1, pause), self.look)

    def check_wait(self, seen: TrainingSeen) -> None:
        idle = self.plan.state is LiveStepState.WAITING
        self.waiting_since = (self.waiting_since or self.now) if idle else None
        if self.waiting_since is not None:
            assert self.now - self.waiting_since < LONGEST_WAIT_SECONDS, self

    # -- the training -------------------------------------------------------------------------

    def train(self) -> None:
        """The ranks form a new world when one of them is gone, or has come."""
        living = [p for p in self.processes if p.alive and p.connected]
        names = {p.name for p in living}
        gone = self.members - names
        if gone or names - self.members:
            whole = len({p.seat for p in living}) >= self.min_world
            self.generation += 1
            self.members = names if whole else set()
        if self.members:
            self.training_step += 1
        slow = 1.0 if self.now < 1.2 * FAULT_SECONDS else 20.0
        self.later(self.random.uniform(0.2, 3.0) * slow, self.train)

    # -- faults -------------------------------------------------------------------------------

    def fault(self) -> None:
        if self.end is not None:
            return
        kind = self.random.choice(("node", "node", "mark", "task", "task", "user", "outcome"))
        node = self.random.choice(self.plan.seat_map.nodes)
        if kind == "node":
            for process in self.processes:
                if process.node == node:
                    process.alive = False
            self.faulty[node] = FaultyNode(node, "no beat", True)
        elif kind == "mark":
            self.faulty.setdefault(node, FaultyNode(node, "Xid", False))
        elif kind == "task":
            living = [p for p in self.processes if p.alive and p.node not in self.faulty]
            if living:
                self.kill_task(self.random.choice(living))
        elif kind == "user" and self.random.random() < 0.3:
            self.user_at = self.now
            self.tell(UserEnded(0))
        elif kind == "outcome" and self.random.random() < 0.3:
            self.tell(TrainingEnded(self.random.choice((0, 3)), self.training_step, "as asked"))

    def kill_task(self, process: Process) -> None:
        """A task dies with all of its ranks."""
        srun = self.sruns[process.step]
        per_task = self.plan.seat_map.per_task
        task = srun.seats.index(process.seat) // per_task
        seats = srun.seats[task * per_task : (task + 1) * per_task]
        for other in self.processes:
            if other.step == process.step and other.seat in seats:
                other.alive = False
        srun.died_untold.add(task)
        srun.code = 137
        self.reap()

    def reap(self) -> None:
        for srun in self.sruns.values():
            mine = [p for p in self.processes if p.step == srun.number]
            if srun.running and mine and not any(p.alive for p in mine):
                srun.running = False

    # -- actions ------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        assert self.end is None, self
        match action:
            case AskToLeave(nodes):
                answer = LeaveJudged(nodes, self.random.random() < 0.7)
                self.later(self.random.choice((0.0, 0.0, 2.0)), lambda: self.tell(answer))
            case LeaveNode(node):
                self.left_nodes[node.node] = len(self.processes)
            case StartSearch():
                self.search(action)
            case StopSearches():
                self.searches.clear()
            case StartJoin():
                self.join(action)
            case EndJoin(step):
                self.sruns[step].ended_by_us = True
                self.end_srun(self.sruns[step])
            case EndSteps():
                self.later(self.random.uniform(0.0, 20.0), self.end_all)
            case EndAttempt():
                self.end, self.ended_at = action, self.now
            case _:
                pass

    def end_srun(self, srun: Srun) -> None:
        srun.running, srun.code = False, srun.code or 143
        for process in self.processes:
            if process.step == srun.number:
                process.alive = False

    def end_all(self) -> None:
        for srun in self.sruns.values():
            if srun.running:
                self.end_srun(srun)
        self.tell(StepsEnded({srun.number: srun.code for srun in self.sruns.values()}))

    def search(self, action: StartSearch) -> None:
        assert action.kind not in self.searches, self
        assert self.user_at is None, self
        self.searches[action.kind] = True
        if action.kind is SearchKind.TASKS:
            bad = {
                lost.node: "Slurm shows DOWN" for lost in action.lost if lost.node in self.faulty
            }
            nodes = () if bad else tuple(lost.node for lost in action.lost)
            found = FoundNodes(Plan("join", "again"), nodes, bad=bad)
            self.later(self.random.uniform(0.0, 5.0), lambda: self.answer(action.kind, found))
            return
        self.wait_for_node(action, self.now)

    def wait_for_node(self, action: StartSearch, began: float) -> None:
        """As `node_search.replace_nodes` does: without a limit while the others go on."""
        if action.kind not in self.searches:
            return
        wanted = len(action.lost)
        if self.spare >= wanted and self.random.random() < 0.5:
            self.spare -= wanted
            names = tuple(self.new_name(lost.node) for lost in action.lost)
            if self.random.random() < 0.2:
                names = names[: wanted - 1]
            self.answer(action.kind, FoundNodes(Plan("join", "exchanged"), names))
            return
        living = tuple(Peer(p.name, p.seat) for p in self.processes if p.alive and p.connected)
        running = tuple(sorted({p.seat for p in self.processes if p.name in self.members}))
        seen = TrainingSeen(self.generation, running, 0, living)
        go_on = steps_without(seen, action.since, self.plan.lost_peers)
        if not go_on and self.now - began > LIMITS.swap_wait:
            self.answer(action.kind, FoundNodes(Plan("requeue", "no idle node")))
            return
        if self.random.random() < 0.02:
            self.spare += 1
        self.later(self.random.uniform(1.0, 60.0), lambda: self.wait_for_node(action, began))

    def new_name(self, lost: str) -> str:
        """A new machine may have the lost one's name."""
        if self.random.random() < 0.3:
            return lost
        self.number += 1
        return f"m{self.number}"

    def answer(self, kind: SearchKind, found: FoundNodes) -> None:
        if self.searches.pop(kind, False) and self.end is None:
            self.tell(SearchEnded(kind, found))

    def join(self, action: StartJoin) -> None:
        assert self.user_at is None, self
        seats = action.slot.seats
        for process in self.processes:
            outside = self.left_nodes.get(process.node, 0) > self.processes.index(process)
            assert not (process.alive and process.seat in seats) or outside, (
                f"seat {process.seat} is joined while {process.name} lives",
                self,
            )
        if self.random.random() < 0.1:
            event: Event = JoinFailed(action.step, "srun cannot be started")
            self.later(0.0, lambda: self.tell(event))
            return
        if action.new_machine:
            self.faulty.pop(action.slot.node, None)
        self.sruns[action.step] = Srun(action.step, seats)
        fate = self.random.choice(("well", "well", "well", "dies", "never seen"))
        for seat in seats:
            name = f"{seat}.{action.incarnation}.{action.step}"
            self.processes.append(
                Process(name, seat, action.incarnation, action.slot.node, action.step, False)
            )
        new = self.processes[-len(seats) :]
        starts = self.random.choice((0.0, 0.0, 5.0))
        self.later(starts, lambda: self.tell(JoinStarted(action.step)))
        if fate == "well":
            self.later(self.random.uniform(1.0, 20.0), lambda: self.connect(new))
        elif fate == "dies":
            self.later(self.random.uniform(1.0, 20.0), lambda: self.die(new))

    def connect(self, processes: list[Process]) -> None:
        for process in processes:
            process.connected = process.alive

    def die(self, processes: list[Process]) -> None:
        for process in processes:
            if process.alive:
                self.kill_task(process)

    def __repr__(self) -> str:
        losses = [
            (loss.slot.node, loss.seats, loss.state.value) for loss in self.plan.record.losses
        ]
        return "\n".join([*self.trace[-60:], f"{self.now:.0f} {self.plan.state} {losses}"])


def check_end(run: Simulation) -> None:
    """Every lost seat is filled, or is left empty, or the step has ended."""
    over = run.plan.state is LiveStepState.OVER
    assert over == (run.end is not None), run
    if run.user_at is not None:
        assert over and run.ended_at - run.user_at < 60.0, run
    if not over:
        # A node is waited for only as long as the others go on.
        going_on = run.plan.state is LiveStepState.DEGRADED
        for loss in run.plan.record.losses:
            searched = loss.state is LostSeatState.SEARCHING and SearchKind.NODES in run.searches
            assert loss.state in SETTLED or (searched and going_on), run
    starts = [join.seats for join in run.plan.record.joins if join.pending]
    assert len({seat for seats in starts for seat in seats}) == sum(map(len, starts)), run


@pytest.mark.parametrize("block", range(10))
def test_a_living_step_comes_to_a_good_end_or_to_one(block: int) -> None:
    for seed in range(block * 30, (block + 1) * 30):
        run = Simulation(seed)
        run.run()
        check_end(run)


def test_a_seed_makes_the_same_run_again() -> None:
    one, other = Simulation(7), Simulation(7)
    one.run()
    other.run()
    assert one.trace == other.trace
