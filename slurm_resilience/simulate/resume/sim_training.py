"""A simulated training that re-forms its own world: its ranks, their mesh, and how they end."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.observer import Picture
from slurm_resilience.mesh.rendezvous import TrainingOutcome
from slurm_resilience.resume.attempt import LEFT
from slurm_resilience.simulate.resume.resume_rules import JoinBudget, ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimStep, SimTask

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld
    from slurm_resilience.simulate.resume.sim_srun import SimSrun

CHECKPOINT_SECONDS = 20.0
START_PATIENCE_SECONDS = 60.0
"""Ranks wait for each other so long at the very first start."""
MINUTES_SECONDS = (60.0, 900.0)
"""The connection to a machine that is gone looks alive for so long."""


@dataclass(frozen=True)
class LivingProgram:
    """The terms that a training asked for."""

    ranks_per_task: int
    """1; or the ranks of a launcher."""
    min_world: int
    """The training steps with so few seats."""
    late_seconds: float = 0.0
    """Its first rank goes on for so long after the training."""
    late_code: int = 0
    """The exit code of that."""
    late_loss: float | None = None
    """Its node loses its power after so many seconds of that."""


class RankStage(enum.Enum):
    """The life of a rank."""

    STARTS = "it is not known to the others yet"
    CONNECTED = "the others know it"
    EXCLUDED = "it was told to leave, or the others have another process for its seat"


@dataclass(eq=False)
class SimRank:
    """One process of a training."""

    peer: Peer
    task: SimTask
    step: SimStep
    number: int
    """SRES_STEP: the number of its step within the attempt."""
    stage: RankStage = RankStage.STARTS
    shown: bool = False
    """An observer has a connection to it."""
    told_generation: int = 0
    """The generation in which it said that it steps; 0: it waits."""

    @property
    def alive(self) -> bool:
        return self.task.alive

    @property
    def seat(self) -> int:
        return self.peer.seat


class MeshStage(enum.Enum):
    """The common work of the ranks."""

    GATHERING = "they wait for each other at the very first start"
    STEPPING = "a world steps"
    WAITING = "no world steps, and another one may be made"
    OVER = "the training has ended"


@dataclass
class SimMesh:
    """The world of the ranks."""

    stage: MeshStage = MeshStage.GATHERING
    generation: int = 0
    members: set[str] = field(default_factory=set)
    """Ids of those that step, or stepped together last."""
    since: float = 0.0
    """When they began to step, or the last world ended."""
    dead_nodes: set[str] = field(default_factory=set)
    """The supervisor told that these are gone."""


@dataclass
class Watched:
    """All that an observer sees and has said."""

    picture: Picture = field(default_factory=Picture)
    number: int = 0
    """Numbers the pictures: an older one that comes later is not shown."""
    newest: int = 0
    """The newest generation that was shown."""
    seats: set[int] = field(default_factory=set)
    """All that were shown."""
    on_news: Callable[[], None] = lambda: None
    findings: dict[str, bool] = field(default_factory=dict)
    """Nodes that must be left, which newcomers are told too; True: dead."""


class SimTraining:
    """The training of one attempt."""

    def __init__(self, world: ResumeWorld, srun: SimSrun, program: LivingProgram) -> None:
        self.world = world
        self.program = program
        self.directory = Path(srun.variables.get("SRES_DIR", ""))
        self.token = srun.token
        tasks = len(srun.wanted) * world.site.tasks_per_node
        self.seats = tasks * program.ranks_per_task
        self.ranks: list[SimRank] = []
        self.mesh = SimMesh(since=world.schedule.now)
        self.watched = Watched()
        self.work_seconds = world.progress.done_seconds
        self.nodes = list(srun.wanted)
        """By NODE_RANK."""
        self.joins = JoinBudget(world.seen.budget.limits)
        self.whole = self.seats
        """Seats of the full world, as its processes tell it."""

    # -- what the rules ask -------------------------------------------------------------------

    @property
    def stalls(self) -> bool:
        """Return whether a world has worked, and none does now; not where that cannot be seen."""
        members, nodes = self.mesh.members, self.world.nodes
        living = [nodes[rank.peer.node] for rank in self.ranks if rank.alive]
        last = [nodes[rank.peer.node] for rank in self.ranks if rank.peer.id in members]
        silent = [node for node in last if node.contact is not NodeContact.FINE]
        unseen = all(
            node.contact is not NodeContact.FINE and not node.shown.is_down
            for node in (*living, *silent)
        )
        return self.mesh.stage is MeshStage.WAITING and not unseen

    @property
    def is_waiting(self) -> bool:
        """Return whether a world has worked, and none does now."""
        return self.mesh.stage is MeshStage.WAITING

    def is_whole(self) -> bool:
        """Return whether all ranks of the job's own nodes step."""
        here = {rank.seat for rank in self.ranks if rank.peer.id in self.mesh.members}
        return self.mesh.stage is MeshStage.STEPPING and here.issuperset(range(self.seats))

    def steps_on(self, nodes: Collection[str]) -> bool:
        """Return whether ranks on each of these nodes step with the others."""
        members = [rank for rank in self.ranks if rank.peer.id in self.mesh.members]
        here = {rank.peer.node for rank in members if rank.alive}
        return self.mesh.stage is MeshStage.STEPPING and here.issuperset(nodes)

    def may_write(self, rank: SimRank) -> bool:
        """Return what `attempt.is_current` tells a rank."""
        if not self.world.may_write(rank.step.srun):
            return False
        try:
            first = int((self.directory / LEFT / rank.peer.node).read_text())
        except FileNotFoundError:
            return True
        return rank.number >= first

    def check_join(self, srun: SimSrun) -> None:
        """Check that a join step may be started now."""
        world = self.world
        if srun.token != self.token:
            world.broken(ResumeRule.TWO_WRITERS, f"a join step of {srun.token} is late")
        seats = self.seats_of(srun)
        node = srun.wanted[0]
        for rank in self.ranks:
            if rank.seat in seats and self._works(rank) and rank.task.killed_at is None:
                world.broken(ResumeRule.SEAT, f"{rank.peer.id} lives, and its seat is filled again")
        begun = {rank.step.srun.pid for rank in self.ranks}
        for other in world.sruns:
            comes = other.running and other.is_join and not other.ordered_to_end
            comes = comes and other.pid not in begun
            if comes and seats & self.seats_of(other) and not self._left(other):
                world.broken(ResumeRule.SEAT, f"two join steps for seats {sorted(seats)}")
        node_rank = int(srun.variables["NODE_RANK"])
        before, self.nodes[node_rank] = self.nodes[node_rank], node
        if before != node:
            world.leave(before)
        # A lost machine may be back, or another one have its name.
        attempts = world.seen.budget.attempts
        since = self.joins.began(seats, attempts[-1].at if attempts else 0.0)
        moved = before != node or world.nodes[node].back_at > since
        wrong = self.joins.start(seats, node, moved, world.schedule.now)
        if wrong:
            world.broken(ResumeRule.BUDGETS, wrong)

    def _left(self, srun: SimSrun) -> bool:
        """Return whether the node of an earlier join step was left since."""
        try:
            first = int((self.directory / LEFT / srun.wanted[0]).read_text())
        except FileNotFoundError:
            return False
        return int(srun.variables["SRES_STEP"]) < first

    def seats_of(self, srun: SimSrun) -> set[int]:
        """Return the seats that a join step fills."""
        listed = srun.variables.get("SRES_SEATS_HERE")
        if listed:
            return {int(word) for word in listed.split(",")}
        per_node = self.world.site.tasks_per_node * self.program.ranks_per_task
        first = int(srun.variables["NODE_RANK"]) * per_node
        return set(range(first, first + srun.ntasks * self.program.ranks_per_task))

    def _works(self, rank: SimRank) -> bool:
        """Return whether a rank could still do harm: it lives, is reached and may write."""
        fine = self.world.nodes[rank.peer.node].contact is NodeContact.FINE
        return rank.alive and fine and not rank.task.hangs and self.may_write(rank)

    # -- how ranks come -----------------------------------------------------------------------

    def begin(self, step: SimStep, node: str, tasks: list[SimTask]) -> None:
        """Start the ranks of one node's tasks."""
        srun, random = step.srun, self.world.random
        per_task = self.program.ranks_per_task
        listed = sorted(self.seats_of(srun)) if srun.is_join else []
        number = int(srun.variables["SRES_STEP"])
        incarnation = int(srun.variables.get("SRES_INCARNATION", "0"))
        slow = srun.is_join and random.random() < 0.03
        imports = random.uniform(1000.0, 3000.0) if slow else random.uniform(1.0, 20.0)
        for task in tasks:
            for local in range(per_task):
                index = task.number * per_task + local
                seat = listed[index] if listed else index
                peer = Peer(f"{seat}.{step.name}", seat, incarnation, node, seats=self.whole)
                rank = SimRank(peer, task, step, number)
                self.ranks.append(rank)
                later = imports + random.uniform(0.0, 0.5)
                self.world.schedule.after(later, self._connect, rank)
            self._plan_failures(step, task)

    def _plan_failures(self, step: SimStep, task: SimTask) -> None:
        world, program = self.world, self.world.site.program
        if program.fails_at is not None and task.number == 0:
            later = program.fails_at + 20.0
            world.schedule.after(later, world.step_life.end_task, step, task, program.fails_with)
        if world.random.random() < program.crashes / 4:
            later = world.random.uniform(1.0, 600.0)
            world.schedule.after(
                later, world.step_life.end_task, step, task, world.random.choice((139, 1))
            )

    def _connect(self, rank: SimRank) -> None:
        world, schedule = self.world, self.world.schedule
        node = world.nodes[rank.peer.node]
        if not rank.alive or rank.task.hangs:
            return
        if self.mesh.stage is MeshStage.OVER:
            self._exit_later(rank, 0)
            return
        if node.contact is not NodeContact.FINE:
            return
        if not self.may_write(rank) or rank.peer.node in self.watched.findings:
            self._exit_later(rank, 1)
            return
        for other in self.ranks:
            if other is not rank and other.seat == rank.seat:
                self._check_beside(other, rank)
                other.stage = RankStage.EXCLUDED
        rank.stage = RankStage.CONNECTED
        world.note(f"rank {rank.peer.id} connects on {rank.peer.node}")
        self._announce(rank)
        # One that dies before it is shown never is.
        schedule.after(world.random.uniform(0.05, 0.6), self._show_again, rank)
        if self.mesh.stage is MeshStage.GATHERING:
            if len(self._candidates()) >= self.seats:
                schedule.after(world.random.uniform(0.1, 1.0), self._form)
            else:
                schedule.after(START_PATIENCE_SECONDS, self._form)
        else:
            self._end_world(world.random.uniform(0.1, 2.0))

    def _check_beside(self, other: SimRank, rank: SimRank) -> None:
        """Check that an older process of a seat does no harm beside a new one."""
        takes_part = other.stage is RankStage.CONNECTED and other.task.killed_at is None
        if takes_part and self._works(other):
            self.world.broken(ResumeRule.SEAT, f"{rank.peer.id} meets {other.peer.id}")
        if other.alive and not other.task.hangs and self.may_write(other):
            self.world.broken(
                ResumeRule.TWO_WRITERS,
                f"{other.peer.id} on {other.peer.node} may write beside {rank.peer.id}",
            )

    def _announce(self, rank: SimRank) -> None:
        peers = self.directory / "mesh" / "peers"
        peers.mkdir(parents=True, exist_ok=True)
        (peers / f"{rank.peer.id}.json").touch()

    def _exit_later(self, rank: SimRank, code: int) -> None:
        later = self.world.random.uniform(0.0, 3.0)
        self.world.schedule.after(later, self.world.step_life.end_task, rank.step, rank.task, code)

    # -- worlds -------------------------------------------------------------------------------

    def _candidates(self) -> list[SimRank]:
        return [
            rank
            for rank in self.ranks
            if rank.stage is RankStage.CONNECTED
            and rank.alive
            and not rank.task.hangs
            and self.world.nodes[rank.peer.node].contact is NodeContact.FINE
        ]

    def _end_world(self, until_next: float) -> None:
        """Have all members leave their block, and make the next world a little later."""
        mesh, now = self.mesh, self.world.schedule.now
        if mesh.stage is MeshStage.STEPPING:
            self.work_seconds += now - mesh.since
            mesh.stage, mesh.since = MeshStage.WAITING, now
            for rank in self._candidates():
                rank.told_generation = 0
            self._publish()
        if mesh.stage is MeshStage.WAITING:
            self.world.schedule.after(until_next, self._form)

    def _form(self) -> None:
        mesh, world = self.mesh, self.world
        if mesh.stage not in (MeshStage.GATHERING, MeshStage.WAITING):
            return
        present = self._chosen(self._candidates())
        early = world.schedule.now - mesh.since < START_PATIENCE_SECONDS
        if mesh.stage is MeshStage.GATHERING and len(present) < self.seats and early:
            return
        if len({rank.seat for rank in present}) < min(self.program.min_world, self.seats):
            return
        if mesh.stage is MeshStage.WAITING and not self._may_go_on(present):
            return
        mesh.stage, mesh.since = MeshStage.STEPPING, world.schedule.now
        mesh.generation += 1
        mesh.members = {rank.peer.id for rank in present}
        for rank in present:
            rank.told_generation = mesh.generation
        world.note(f"world {mesh.generation} steps with {len(present)} of {self.seats} seats")
        left = max(0.0, world.site.program.work_seconds - self.work_seconds)
        world.schedule.after(left, self._done, mesh.generation)
        world.schedule.after(CHECKPOINT_SECONDS, self._checkpoint, mesh.generation)
        self._publish()

    def _chosen(self, present: list[SimRank]) -> list[SimRank]:
        """Return those of the present ranks that would make a world."""
        return present

    def _may_go_on(self, present: list[SimRank]) -> bool:
        """Two halves of a cut network never both go on."""
        here = {rank.peer.id for rank in present}
        missing = [
            rank
            for rank in self.ranks
            if rank.peer.id in self.mesh.members - here and not self._known_dead(rank)
        ]
        return not missing or 2 * (len(self.mesh.members) - len(missing)) > len(self.mesh.members)

    def _known_dead(self, rank: SimRank) -> bool:
        told = rank.peer.node in self.mesh.dead_nodes
        there = self.world.nodes[rank.peer.node].contact is NodeContact.FINE
        return told or rank.stage is RankStage.EXCLUDED or (there and not rank.alive)

    def _checkpoint(self, generation: int) -> None:
        mesh, world = self.mesh, self.world
        if mesh.stage is not MeshStage.STEPPING or mesh.generation != generation:
            return
        if any(self.may_write(rank) for rank in self._candidates()):
            world.program.checkpoint(
                self.work_seconds + world.schedule.now - mesh.since, self.directory
            )
        world.schedule.after(CHECKPOINT_SECONDS, self._checkpoint, generation)

    def _done(self, generation: int) -> None:
        mesh, world = self.mesh, self.world
        if mesh.stage is not MeshStage.STEPPING or mesh.generation != generation:
            return
        writers = [rank for rank in self._candidates() if self.may_write(rank)]
        if not writers or self.mesh.members - {rank.peer.id for rank in self._candidates()}:
            return  # no step ends without one of them: the next world ends it
        mesh.stage = MeshStage.OVER
        seats = tuple(rank.seat for rank in self.ranks if rank.peer.id in mesh.members)
        outcome = TrainingOutcome(0, mesh.generation, "all steps are done", seats)
        (self.directory / "mesh" / "outcome").write_bytes(msgspec.json.encode(outcome))
        told = any(srun.running and not srun.ordered_to_end for srun in world.sruns)
        # A task that failed is part of what srun tells of the program, if the others were not seen
        # to step without it.
        seen = len(self.watched.seats) >= self.seats and self.watched.newest == mesh.generation
        told = told and seen
        # The job waits for none but its own.
        own = [rank for rank in writers if not rank.step.srun.is_companion]
        world.program.program_ended_well(told, [rank.task for rank in own])
        first = min(own or writers, key=lambda rank: rank.seat)
        for rank in self.ranks:
            later = world.random.uniform(0.0, 3.0)
            world.schedule.after(later, self._leave, rank, first.task)
        self._publish()

    def _leave(self, rank: SimRank, late: SimTask) -> None:
        """Have a rank leave a training that is over, and go on with what comes after it."""
        self._show(rank, False)
        if rank.task is not late:
            self.world.step_life.end_task(rank.step, rank.task, 0)
            return
        program, schedule = self.program, self.world.schedule
        if program.late_loss is not None:
            schedule.after(program.late_loss, self.world.progress.strike_node, late.node)
        schedule.after(
            program.late_seconds, self.world.step_life.end_task, rank.step, late, program.late_code
        )

    # -- how ranks go -------------------------------------------------------------------------

    def asked_to_leave(self, step: SimStep) -> bool:
        """Have the ranks of a step leave that were started on lent nodes; False: there are none."""
        return False

    def task_gone(self, task: SimTask) -> None:
        """Have the others notice, sooner or later, that a task's ranks are gone."""
        for rank in self.ranks:
            if rank.task is task:
                self._lose(rank)

    def node_gone(self, node: str) -> None:
        """Have the others notice that a node does not answer any more."""
        for rank in self.ranks:
            if rank.peer.node == node:
                self._lose(rank)

    def _lose(self, rank: SimRank) -> None:
        random, schedule = self.world.random, self.world.schedule
        there = self.world.nodes[rank.peer.node].contact is NodeContact.FINE
        # A closed connection is noticed at once, silence is not, and an observer judges none.
        noticed = random.uniform(0.02, 0.5) if there else random.uniform(3.0, 10.0)
        schedule.after(noticed, self._notice, rank)
        unseen = random.uniform(0.02, 0.5) if there else random.uniform(*MINUTES_SECONDS)
        schedule.after(unseen, self._show, rank, False)

    def _notice(self, rank: SimRank) -> None:
        if rank.peer.id in self.mesh.members:
            self._end_world(self.world.random.uniform(0.1, 2.0))

    # -- the observer -------------------------------------------------------------------------

    def _show(self, rank: SimRank, shown: bool) -> None:
        if rank.shown is not shown:
            rank.shown = shown
            self._publish()

    def _publish(self) -> None:
        """Let an observer see what is there now: a little later, at times much later."""
        world, random = self.world, self.world.random
        shown = [rank for rank in self.ranks if rank.shown]
        newest = max((rank.told_generation for rank in shown), default=0)
        running = [rank for rank in shown if newest and rank.told_generation == newest]
        waiting = [rank.seat for rank in shown if not newest or rank.told_generation != newest]
        picture = Picture(
            self.mesh.generation if shown else 0,
            tuple(sorted(rank.seat for rank in running)),
            tuple(sorted(waiting)),
            int(self.work_seconds),
            tuple(rank.peer for rank in shown),
            inside=frozenset(rank.peer.id for rank in running),
        )
        self.watched.number += 1
        late = random.random() < 0.05
        lag = random.uniform(2.0, 8.0) if late else random.uniform(0.0, 0.3)
        world.schedule.after(lag, self._see, self.watched.number, picture)
        if shown and random.random() < 0.03:
            # A connection breaks, and is made again: the process is none the worse for it.
            rank = random.choice(shown)
            world.schedule.after(0.0, self._show, rank, False)
            world.schedule.after(random.uniform(0.5, 15.0), self._show_again, rank)

    def _show_again(self, rank: SimRank) -> None:
        connected = rank.stage is not RankStage.STARTS and self.mesh.stage is not MeshStage.OVER
        self._show(rank, rank.alive and connected)

    def _see(self, number: int, picture: Picture) -> None:
        back = self.world.supervisor.stopped_until
        if self.world.schedule.now < back:
            # It is read when the supervisor goes on.
            later = back + self.world.random.uniform(0.1, 2.0)
            self.world.schedule.at(later, self._see, number, picture)
        elif number == self.watched.number:
            self.watched.picture = picture
            self.watched.newest = max(self.watched.newest, picture.generation)
            self.watched.seats.update(peer.seat for peer in picture.peers)
            self.watched.on_news()

    def told(self, node: str, *, dead: bool) -> None:
        """Hear that a node must be left."""
        self.watched.findings[node] = dead
        later = self.world.random.uniform(0.01, 1.0)
        ranks = [rank for rank in self.ranks if rank.peer.node == node]
        self.world.schedule.after(later, self._take_finding, node, ranks, dead)

    def _take_finding(self, node: str, ranks: list[SimRank], dead: bool) -> None:
        if dead:
            self.mesh.dead_nodes.add(node)
        for rank in ranks:
            rank.stage = RankStage.EXCLUDED
            if self.world.nodes[node].contact is NodeContact.FINE and rank.alive:
                self._exit_later(rank, 1)
        # Also where the world has ended already, and waited for this word.
        self._end_world(self.world.random.uniform(0.1, 2.0))

    def suspected(self, node: str) -> None:
        """Hear that a node may be gone: those that do not answer are left sooner."""
        for rank in self.ranks:
            if rank.peer.node == node and self.world.nodes[node].contact is not NodeContact.FINE:
                self.world.schedule.after(self.world.random.uniform(0.1, 1.0), self._notice, rank)


class SimObserver:
    """`Observer` of one attempt's training."""

    def __init__(self, training: SimTraining, on_news: Callable[[], None]) -> None:
        self._training = training
        training.watched.on_news = on_news

    def find(self, node: str, reason: str, dead: bool) -> None:
        self._training.told(node, dead=dead)

    def suspect(self, node: str, reason: str) -> None:
        self._training.suspected(node)

    def forget(self, node: str) -> None:
        self._training.watched.findings.pop(node, None)
        self._training.mesh.dead_nodes.discard(node)

    def take_wrong_nodes(self) -> dict[str, str]:
        """No simulated chip computes wrong."""
        return {}

    def picture(self) -> Picture:
        return self._training.watched.picture
