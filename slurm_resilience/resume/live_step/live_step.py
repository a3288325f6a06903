"""A living step: it loses nodes and tasks, the others go on, and join steps fill the seats."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event

from slurm_resilience.mesh.observer import Observer, Picture
from slurm_resilience.resume import fence, report
from slurm_resilience.resume.context import Context
from slurm_resilience.resume.decide.plan import Plan, after_task
from slurm_resilience.resume.live_step import node_search
from slurm_resilience.resume.live_step import training as word
from slurm_resilience.resume.live_step.join_step import SeatMap, seats_of_tasks
from slurm_resilience.resume.live_step.live_steps import RunningStep, StepEnd
from slurm_resilience.resume.live_step.losses import SeatHistory, SeatLoss, tell
from slurm_resilience.resume.live_step.node_search import FoundNodes, NodeSearch
from slurm_resilience.resume.live_step.seats import Seats
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.wire.messages import NodeVerdict

LOOK = 1.0
"""Seconds between two looks when nothing is heard."""
MEND = 10.0
"""Seconds between two looks whether the fence stands."""


class LiveStep:
    """One attempt that lives on."""

    def __init__(
        self,
        context: Context,
        training: Observer,
        meet: Path,
        world: SeatMap,
        attempt: Attempt,
        step: SrunStep,
        *,
        may_leave: Callable[[Mapping[str, NodeVerdict]], bool],
        mend: Callable[[], None],
        addresses: Mapping[str, str],
    ) -> None:
        """
        Args:
            training: the running one.
            meet: where it meets.
            world: who sits where.
            attempt: what was started.
            step: its first step.
            may_leave: is there anywhere to go from nodes that still work?
            mend: called from time to time.
            addresses: of the nodes, by name.
        """
        self._context = context
        self._training = training
        self._meet = meet
        self._attempt = attempt
        self._may_leave = may_leave
        self._mend = mend
        self._seats = Seats(context, attempt, world, step)
        self._steps = self._seats.steps
        self._losses: list[SeatLoss] = []
        self._hunts: dict[bool, tuple[NodeSearch, list[SeatLoss]]] = {}
        """By whether nodes (else tasks) are looked after."""
        self._seen = SeatHistory()
        self._gone: set[str] = set()
        """Processes on lost nodes: they do not say goodbye."""
        self._stays: frozenset[str] = frozenset()
        self._instead: tuple[Plan, float] | None = None
        """What has to be done where nobody can join, and since when."""
        self._mended = time.monotonic()
        self._addresses = dict(addresses)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the training runs, by NODE_RANK."""
        return self._seats.nodes

    def watch(self) -> StepEnd:
        """Until the attempt is over; no step of it is left then."""
        try:
            while True:
                self._context.wake.wait(self._pause())
                self._context.wake.clear()
                picture = self._training.picture()
                self._seen.look(picture)
                self._look_at_nodes()
                end = self._over(picture)
                if end is not None:
                    return end
                for carrier, ended in self._steps.news():
                    seats = seats_of_tasks(carrier.seats, self._seats.world.per_task, ended.tasks)
                    self._lose_seats(carrier, seats, ended.how)
                self._look_at_hunts()
                self._look_at_losses(self._training.picture())
        finally:
            self._stop_hunts()

    def let_go(self) -> StepEnd:
        """Only wait until it is over."""
        while (end := self._over(self._training.picture())) is None:
            self._context.wake.wait(LOOK)
            self._context.wake.clear()
        return end

    def _pause(self) -> float:
        """Seconds until the next look, unless there is news."""
        now = time.monotonic()
        if now - self._mended > MEND:
            self._mended = now
            self._mend()
        dues = [loss.due - now for loss in self._losses if not loss.hunted and loss.due > now]
        return max(0.0, min([LOOK, *dues]))

    def _alive(self, picture: Picture) -> set[int]:
        """Seats with a living process."""
        return {peer.seat for peer in picture.peers if peer.id not in self._gone}

    # -- the end ------------------------------------------------------------------------------

    def _over(self, picture: Picture) -> StepEnd | None:
        outcome = word.outcome(self._meet)
        if outcome is not None:
            if outcome.code != 0:
                report.say(f"the training ended at step {outcome.step}: {outcome.reason}")
            self._stop_hunts()
            self._steps.let_end()
            return self._end(self._steps.first.step, outcome.code, own_word=True)
        self._steps.dismiss(self._alive(picture))
        theirs = self._steps.ended_by_person()
        if theirs is not None:
            self._stop_hunts()
            self._steps.end(at_once=False)
            return self._end(theirs.step, theirs.step.code)
        if self._instead is not None:
            chosen, noticed = self._instead
            report.say(f"nobody can join ({chosen.reason}): the step is ended")
            self._steps.end(at_once=any(loss.dead for loss in self._losses))
            step = self._steps.first.step
            return self._end(step, step.code, stopped_by_us=True, noticed=noticed)
        if not self._steps.running:
            step = max((carrier.step for carrier in self._steps), key=lambda step: step.code)
            return self._end(step, step.code or int(bool(self._losses)))
        return None

    def _end(
        self,
        step: SrunStep,
        code: int,
        *,
        stopped_by_us: bool = False,
        noticed: float = 0.0,
        own_word: bool = False,
    ) -> StepEnd:
        faulty = {loss.slot.node: loss.reason for loss in self._losses if loss.at_fault}
        return StepEnd(code, step, stopped_by_us, faulty, noticed, own_word)

    def _stop_hunts(self) -> None:
        for search, _ in self._hunts.values():
            search.stop()
        self._hunts.clear()

    # -- what is lost -------------------------------------------------------------------------

    def _look_at_nodes(self) -> None:
        lost = {loss.slot.node for loss in self._losses if loss.at_fault and not loss.node}
        bad = {
            name: verdict
            for name, verdict in self._context.link.faulty().items()
            if name in self.nodes and name not in lost
        }
        for slot in self._seats.world.slots:
            if slot.node not in lost and self._seats.given_up(slot):
                bad.setdefault(slot.node, NodeVerdict(slot.node, "dead", "Slurm gave it up"))
        if not bad or frozenset(bad) == self._stays:
            return
        for verdict in bad.values():
            if verdict.verdict == "dead":
                # Before anything else: the others wait for it.
                self._training.find(verdict.node, verdict.reason, True)
        if not self._may_leave(bad):
            self._stays = frozenset(bad)
            return
        for verdict in bad.values():
            if verdict.verdict != "dead":
                self._training.find(verdict.node, verdict.reason, False)
            self._lose_node(verdict.node, verdict.reason, verdict.verdict == "dead")

    def _lose_node(self, node: str, reason: str, dead: bool) -> None:
        slot = next(slot for slot in self._seats.world.slots if slot.node == node)
        report.say(f"node {node} must be left ({reason}); the step goes on without it")
        self._context.events.write("noticed", nodes=[node], seats=list(slot.seats))
        fence.leave(self._attempt.directory, node, len(self._steps))
        self._steps.without_node(slot.seats)
        if dead:
            # At once: a new machine of that name may be there before a place is found.
            self._steps.sever(slot.seats, self._addresses.get(node, node))
        # A joiner that was on its way to this node is lost with it.
        self._losses = [loss for loss in self._losses if loss.slot.rank != slot.rank]
        self._losses.append(self._seen.loss(slot, slot.seats, reason, dead=dead))
        self._gone |= self._seen.ids(slot.seats)

    def _lose_seats(self, carrier: RunningStep, seats: tuple[int, ...], how: str) -> None:
        """Tasks are gone: after a moment in which their node may be found to be at fault, they are
        started again on it."""
        lost = {seat for loss in self._losses for seat in loss.seats if not loss.started}
        mine = self._steps.carried(carrier) - lost
        for slot in self._seats.world.slots:
            here = tuple(seat for seat in slot.seats if seat in seats and seat in mine)
            if not here:
                continue
            # Those who were on their way, and died.
            self._losses = [loss for loss in self._losses if not set(loss.seats) <= set(here)]
            loss = self._seen.loss(slot, here, how, dead=False)
            loss.at_fault = False
            loss.due = time.monotonic() + self._context.limits.diagnosis_wait
            self._losses.append(loss)
            self._context.link.ask((slot.node,))

    # -- a place for them ---------------------------------------------------------------------

    def _look_at_hunts(self) -> None:
        for key, (search, losses) in list(self._hunts.items()):
            if search.over:
                del self._hunts[key]
                self._place(search.found, losses)
        if self._instead is not None:
            return
        for key in (True, False):
            waiting = [
                loss
                for loss in self._losses
                if loss.at_fault is key and not loss.hunted and loss.due <= time.monotonic()
            ]
            if not waiting or key in self._hunts:
                continue
            going = waiting if key else self._to_be_started_again(waiting)
            for loss in going:
                loss.hunted = True
            if going:
                begin = self._after_nodes if key else self._after_tasks
                self._hunts[key] = (begin(going), going)

    def _after_nodes(self, losses: list[SeatLoss]) -> NodeSearch:
        gone = {loss.slot.node for loss in self._losses if loss.at_fault and not loss.node}
        lost = {loss.slot.node: loss.reason for loss in losses}
        holds = tuple(name for name in self.nodes if name not in gone)
        dead = all(loss.dead for loss in losses)
        since = max(loss.generation for loss in losses)

        def go_on() -> bool:
            return self._goes_on(self._training.picture(), since)

        def search(stop: Event) -> FoundNodes | None:
            size = len(self.nodes)
            return node_search.for_nodes(self._context, lost, size, holds, dead, go_on, stop)

        return NodeSearch(search, self._context.wake.set)

    def _after_tasks(self, losses: list[SeatLoss]) -> NodeSearch:
        nodes = tuple(loss.slot.node for loss in losses)
        return NodeSearch(
            lambda _: node_search.for_tasks(self._context, nodes), self._context.wake.set
        )

    def _to_be_started_again(self, losses: list[SeatLoss]) -> list[SeatLoss]:
        alive = self._alive(self._training.picture())
        going = []
        for loss in losses:
            # Their launcher may have filled the seats already.
            if not alive.issuperset(loss.seats):
                chosen = after_task(self._seats.died(loss.seats), self._context.limits)
                if chosen.kind == "join":
                    going.append(loss)
                    continue
                seats = ",".join(map(str, loss.seats))
                report.say(f"seats {seats} stay empty: {loss.reason}; {chosen.reason}")
            self._losses.remove(loss)
        return going

    def _place(self, found: FoundNodes | None, losses: list[SeatLoss]) -> None:
        """Use what was found.

        Args:
            losses: those that it was hunted for; some may be no more.
        """
        placed = dict(zip(map(id, losses), found.nodes, strict=False)) if found else {}
        losses = [loss for loss in losses if loss in self._losses]
        if found is None or not losses:
            return
        if found.bad:
            for loss in losses:
                loss.hunted = False
            for name, why in found.bad.items():
                self._training.find(name, why, False)
                self._lose_node(name, why, False)
            return
        if found.chosen.kind != "join":
            self._instead = (found.chosen, min(loss.noticed for loss in losses))
            self._context.wake.set()
            return
        if any(loss.at_fault for loss in losses):
            self._context.events.write("nodes_ready", nodes=list(found.nodes))
        self._addresses |= found.addresses
        for loss in losses:
            node = placed.get(id(loss))
            if node is None:
                loss.hunted = False
                continue
            loss.node, loss.nodes_ready = node, time.time()
            self._training.forget(node)
            incarnation = 1 + max(self._seen.incarnation.get(seat, 0) for seat in loss.seats)
            self._seats.fill(loss, found, incarnation)

    # -- what became of it --------------------------------------------------------------------

    def _goes_on(self, picture: Picture, since: int) -> bool:
        """Do all who live step together, in a world later than ``since``?"""
        running = set(picture.running)
        return picture.generation > since and bool(running) and running >= self._alive(picture)

    def _look_at_losses(self, picture: Picture) -> None:
        for loss in list(self._losses):
            if not loss.went_on and self._goes_on(picture, loss.generation):
                loss.went_on = time.time()
                after = loss.went_on - loss.noticed
                size = len(picture.running)
                report.say(f"{size} of {self._seats.world.seats} seats went on after {after:.1f} s")
                self._context.events.write("went_on", seats=size)
            if loss.started and self._has_joined(picture, loss):
                self._losses.remove(loss)
                self._training.forget(loss.slot.node)
                self._context.events.write("joined", nodes=[loss.node], seats=list(loss.seats))
                tell(loss, self.nodes, picture.step)

    def _has_joined(self, picture: Picture, loss: SeatLoss) -> bool:
        new = {peer.seat for peer in picture.peers if peer.id not in loss.peers}
        seats = set(loss.seats)
        return seats <= new and seats <= set(picture.running)
