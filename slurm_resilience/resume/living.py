"""A living step: it loses nodes and tasks, the others go on, and join steps fill the seats."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.observer import Observer, Picture
from slurm_resilience.resume import fence, hunt, report, word
from slurm_resilience.resume.environment import Attempt, srun_environment, task_variables
from slurm_resilience.resume.hunt import Found, Hunt
from slurm_resilience.resume.join import (
    Slot,
    World,
    join_command,
    join_variables,
    seats_of_tasks,
)
from slurm_resilience.resume.means import Means
from slurm_resilience.resume.plan import Plan, after_task
from slurm_resilience.resume.step import Step, end_step
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.messages import AttemptStarted, NodeVerdict

LOOK = 1.0
"""Seconds between two looks when nothing is heard."""


@dataclass(eq=False)
class Carrier:
    """A running step of the attempt."""

    step: Step
    number: int
    seats: tuple[int, ...]
    """In the order of its tasks."""
    heard: int = 0
    """Ended tasks that were read already."""
    lost_node: bool = False
    """srun may wait for a node that is gone."""
    dismissed: bool = False
    """Its srun was ended by us: Slurm says that the step is over."""


@dataclass(eq=False)
class Loss:
    """Seats of one node that are to be filled again."""

    slot: Slot
    """As it was."""
    seats: tuple[int, ...]
    reason: str
    noticed: float
    """Seconds since the epoch, as all others here; 0: not yet."""
    dead: bool
    peers: frozenset[str]
    """Ids of the processes that are gone."""
    generation: int
    """The last one that they were in."""
    at_fault: bool = True
    """The node is; else only its tasks died."""
    due: float = 0.0
    """Monotonic: when it is acted on."""
    hunted: bool = False
    node: str = ""
    """The one that takes the seats over."""
    went_on: float = 0.0
    nodes_ready: float = 0.0
    started: float = 0.0


@dataclass
class Seen:
    """What was seen of each seat so far."""

    peers: dict[int, set[str]] = field(default_factory=dict)
    generation: dict[int, int] = field(default_factory=dict)
    incarnation: dict[int, int] = field(default_factory=dict)

    def look(self, picture: Picture) -> None:
        for peer in picture.peers:
            self.peers.setdefault(peer.seat, set()).add(peer.id)
            known = self.incarnation.get(peer.seat, 0)
            self.incarnation[peer.seat] = max(known, peer.incarnation)
        for seat in picture.running:
            self.generation[seat] = picture.generation


class End(msgspec.Struct, frozen=True):
    """How the attempt ended."""

    code: int
    """As a shell shows it."""
    step: Step
    """The one whose end it was."""
    stopped_by_us: bool = False
    faulty: dict[str, str] = {}
    """Nodes that were lost and not replaced."""
    noticed: float = 0.0
    own_word: bool = False
    """The training itself said how it ended."""


class Living:
    """One attempt that lives on."""

    def __init__(
        self,
        means: Means,
        training: Observer,
        meet: Path,
        world: World,
        attempt: Attempt,
        step: Step,
        *,
        may_leave: Callable[[Mapping[str, NodeVerdict]], bool],
        mend: Callable[[], None],
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
        """
        self._means = means
        self._training = training
        self._meet = meet
        self._world = world
        self._attempt = attempt
        self._variables = task_variables(attempt)
        self._may_leave = may_leave
        self._mend = mend
        first = tuple(range(world.seats))
        self._carriers = [Carrier(step, 0, first)]
        self._losses: list[Loss] = []
        self._hunts: dict[bool, tuple[Hunt, list[Loss]]] = {}
        """By whether nodes (else tasks) are looked after."""
        self._seen = Seen()
        self._gone: set[str] = set()
        """Processes on lost nodes."""
        self._stays: frozenset[str] = frozenset()
        self._deaths: dict[int, int] = {}
        self._joined_at: dict[int, float] = {}
        self._instead: tuple[Plan, float] | None = None
        self._master = attempt.master_address
        self._silent_look = 0.0
        self._mended = time.monotonic()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the training runs, by NODE_RANK."""
        return self._world.nodes

    def watch(self) -> End:
        """Until the attempt is over; no step of it is left then."""
        try:
            while True:
                self._means.wake.wait(self._pause())
                self._means.wake.clear()
                picture = self._training.picture()
                self._seen.look(picture)
                self._look_at_nodes()
                end = self._over(picture)
                if end is not None:
                    return end
                self._look_at_tasks(picture)
                self._look_at_hunts()
                self._look_at_losses(self._training.picture())
        finally:
            for search, _ in self._hunts.values():
                search.stop()

    def _pause(self) -> float:
        now = time.monotonic()
        if now - self._mended > 10.0:
            self._mended = now
            self._mend()
        dues = [loss.due - now for loss in self._losses if not loss.hunted]
        return max(0.0, min([LOOK, *dues]))

    # -- the end ------------------------------------------------------------------------------

    def _over(self, picture: Picture) -> End | None:
        outcome = word.outcome(self._meet)
        if outcome is not None:
            if outcome.code != 0:
                report.say(f"the training ended at step {outcome.step}: {outcome.reason}")
            self._let_end()
            return self._end(self._carriers[0], code=outcome.code, own_word=True)
        self._dismiss(picture)
        for carrier in self._carriers:
            if not carrier.step.running and self._by_person(carrier):
                self._end_all(at_once=False)
                return self._end(carrier)
        if self._instead is not None:
            chosen, noticed = self._instead
            report.say(f"nobody can join ({chosen.reason}): the step is ended")
            self._end_all(at_once=any(loss.dead for loss in self._losses))
            return self._end(self._carriers[0], stopped_by_us=True, noticed=noticed)
        if not any(carrier.step.running for carrier in self._carriers):
            worst = max(self._carriers, key=lambda carrier: carrier.step.code)
            code = worst.step.code or int(bool(self._losses))
            return self._end(worst, code=code)
        return None

    def _end(
        self,
        carrier: Carrier,
        *,
        code: int | None = None,
        stopped_by_us: bool = False,
        noticed: float = 0.0,
        own_word: bool = False,
    ) -> End:
        return End(
            carrier.step.code if code is None else code,
            carrier.step,
            stopped_by_us,
            {loss.slot.node: loss.reason for loss in self._losses if loss.at_fault},
            noticed,
            own_word,
        )

    def _by_person(self, carrier: Carrier) -> bool:
        step = carrier.step
        if carrier.dismissed:
            return False
        aborted = step.aborted and not carrier.lost_node
        return bool(
            step.cancelled or aborted or step.killed_by or self._means.interrupted(step, False)
        )

    def _alive(self, picture: Picture) -> set[int]:
        """Seats with a living process. One on a dead node does not say goodbye."""
        return {peer.seat for peer in picture.peers if peer.id not in self._gone}

    def _dismiss(self, picture: Picture) -> None:
        """An srun that lost a node may wait for it for minutes when all others are gone."""
        alive = self._alive(picture)
        silent = [
            carrier
            for carrier in self._carriers
            if carrier.step.running and carrier.lost_node and not alive & set(carrier.seats)
        ]
        if silent and time.monotonic() - self._silent_look >= LOOK:
            self._silent_look = time.monotonic()
            self._dismiss_ended(silent)

    def _dismiss_ended(self, carriers: list[Carrier]) -> None:
        allocation = self._means.allocation
        try:
            running = {step.srun_pid for step in self._means.client.steps(allocation.id)}
        except SresError:
            return
        for carrier in carriers:
            if not carrier.step.running or carrier.step.pid in running:
                continue
            # Its tasks are gone: a moment for their last words, which srun still prints.
            if not carrier.step.wait(0.1):
                carrier.dismissed = True
                carrier.step.send_signal(signal.SIGKILL)
                carrier.step.wait(5.0)

    def _let_end(self) -> None:
        """The training said its last word: its tasks end by themselves, or are ended."""
        deadline = time.monotonic() + self._means.limits.grace
        while any(carrier.step.running for carrier in self._carriers):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._means.wake.wait(min(left, 0.2))
            self._means.wake.clear()
            self._dismiss_ended([carrier for carrier in self._carriers if carrier.lost_node])
        self._end_all(at_once=False)

    def _end_all(self, *, at_once: bool) -> None:
        means = self._means
        for search, _ in self._hunts.values():
            search.stop()
        for carrier in reversed(self._carriers):
            if carrier.step.running:
                end_step(
                    carrier.step,
                    means.client,
                    means.allocation.id,
                    means.host,
                    grace=means.limits.grace,
                    at_once=at_once or carrier.number > 0,
                )

    # -- what is lost -------------------------------------------------------------------------

    def _look_at_nodes(self) -> None:
        lost = {loss.slot.node for loss in self._losses if loss.at_fault and not loss.node}
        bad = {n: v for n, v in self._means.link.faulty().items() if n in self.nodes}
        bad = {name: verdict for name, verdict in bad.items() if name not in lost}
        for carrier in self._carriers:
            for name in carrier.step.failed_nodes & set(self.nodes) - lost - bad.keys():
                if self._carries(carrier, name):
                    bad[name] = NodeVerdict(name, "dead", "Slurm gave it up")
        if not bad or frozenset(bad) == self._stays:
            return
        for verdict in bad.values():
            if verdict.verdict == "dead":
                self._training.find(verdict.node, verdict.reason, True)
        if not self._may_leave(bad):
            self._stays = frozenset(bad)
            return
        for verdict in bad.values():
            if verdict.verdict != "dead":
                self._training.find(verdict.node, verdict.reason, False)
            self._lose_node(verdict.node, verdict.reason, verdict.verdict == "dead")

    def _carries(self, carrier: Carrier, node: str) -> bool:
        """Does this step still carry what sits on the node? Another may have taken it over."""
        last = next(
            c for c in reversed(self._carriers) if set(c.seats) & set(self._slot(node).seats)
        )
        return last is carrier

    def _slot(self, node: str) -> Slot:
        return next(slot for slot in self._world.slots if slot.node == node)

    def _lose_node(self, node: str, reason: str, dead: bool) -> None:
        slot = self._slot(node)
        report.say(f"node {node} must be left ({reason}); the step goes on without it")
        self._means.events.write("noticed", nodes=[node], seats=list(slot.seats))
        fence.leave(self._attempt.directory, node, len(self._carriers))
        for carrier in self._carriers:
            carrier.lost_node |= bool(set(carrier.seats) & set(slot.seats))
        # A joiner that was on its way to this node is lost with it.
        self._losses = [loss for loss in self._losses if loss.slot.rank != slot.rank]
        loss = self._loss(slot, slot.seats, reason, dead=dead)
        self._gone |= loss.peers
        self._losses.append(loss)

    def _loss(self, slot: Slot, seats: tuple[int, ...], reason: str, *, dead: bool) -> Loss:
        peers = {name for seat in seats for name in self._seen.peers.get(seat, ())}
        generation = max((self._seen.generation.get(seat, 0) for seat in seats), default=0)
        return Loss(slot, seats, reason, time.time(), dead, frozenset(peers), generation)

    def _look_at_tasks(self, picture: Picture) -> None:
        for carrier in self._carriers:
            news = carrier.step.ended_tasks[carrier.heard :]
            carrier.heard += len(news)
            for _, tasks, how in news:
                seats = seats_of_tasks(carrier.seats, self._world.per_task, tasks)
                self._lose_seats(carrier, seats, how)
            joins = [loss for loss in self._losses if set(loss.seats) <= set(carrier.seats)]
            if carrier.number and not carrier.step.running and (joins or not carrier.heard):
                carrier.heard = carrier.heard or 1
                for loss in joins:
                    if loss.started and loss.hunted:
                        self._losses.remove(loss)
                self._lose_seats(carrier, carrier.seats, f"step ended with {carrier.step.code}")

    def _lose_seats(self, carrier: Carrier, seats: tuple[int, ...], how: str) -> None:
        """Tasks are gone: after a moment in which their node may be found to be at fault, they are
        started again on it."""
        lost = {seat for loss in self._losses for seat in loss.seats if not loss.started}
        for slot in self._world.slots:
            here = tuple(s for s in slot.seats if s in seats and s not in lost)
            last = [c for c in self._carriers if set(c.seats) & set(here)]
            if not here or last[-1] is not carrier:
                continue
            self._losses = [
                loss
                for loss in self._losses
                if not (
                    loss.slot.rank == slot.rank and loss.started and set(loss.seats) <= set(here)
                )
            ]
            loss = self._loss(slot, here, how, dead=False)
            loss.at_fault = False
            loss.due = time.monotonic() + self._means.limits.diagnosis_wait
            self._losses.append(loss)
            self._means.link.ask((slot.node,))

    # -- a place for them ---------------------------------------------------------------------

    def _look_at_hunts(self) -> None:
        for key, (search, losses) in list(self._hunts.items()):
            if search.over:
                del self._hunts[key]
                self._place(search.found, [loss for loss in losses if loss in self._losses])
        for key in (True, False):
            waiting = [
                loss
                for loss in self._losses
                if loss.at_fault is key and not loss.hunted and loss.due <= time.monotonic()
            ]
            if waiting and key not in self._hunts and self._instead is None:
                for loss in waiting:
                    loss.hunted = True
                begun = self._after_nodes(waiting) if key else self._after_tasks(waiting)
                if begun is not None:
                    self._hunts[key] = (begun, waiting)

    def _after_nodes(self, losses: list[Loss]) -> Hunt:
        gone = {loss.slot.node for loss in self._losses if loss.at_fault and not loss.node}
        lost = {loss.slot.node: loss.reason for loss in losses}
        holds = [name for name in self.nodes if name not in gone]
        since = max(loss.generation for loss in losses)
        return Hunt(
            lambda stop: hunt.for_nodes(
                self._means,
                lost,
                len(self.nodes),
                holds,
                all(loss.dead for loss in losses),
                lambda: self._goes_on(self._training.picture(), since),
                stop,
            ),
            self._means.wake.set,
        )

    def _after_tasks(self, losses: list[Loss]) -> Hunt | None:
        alive = self._alive(self._training.picture())
        for loss in losses:
            if alive.issuperset(loss.seats):
                self._losses.remove(loss)  # their launcher has filled the seats already
        going = []
        again = Plan("join", "")
        for loss in [loss for loss in losses if loss in self._losses]:
            chosen = after_task(self._count(loss), self._means.limits)
            if chosen.kind == "join":
                going.append(loss)
                again = chosen
            else:
                seats = ",".join(map(str, loss.seats))
                report.say(f"seats {seats} stay empty: {loss.reason}; {chosen.reason}")
                self._losses.remove(loss)
        losses[:] = going
        nodes = [loss.slot.node for loss in going]
        if not going:
            return None
        return Hunt(lambda stop: hunt.for_tasks(self._means, nodes, again), self._means.wake.set)

    def _count(self, loss: Loss) -> int:
        """How often these seats' tasks have died in a row."""
        now = time.monotonic()
        for seat in loss.seats:
            lived = now - self._joined_at.get(seat, float("-inf"))
            before = 0 if lived > self._means.limits.progress_after else self._deaths.get(seat, 0)
            self._deaths[seat] = before + 1
        return max(self._deaths[seat] for seat in loss.seats)

    def _place(self, found: Found | None, losses: list[Loss]) -> None:
        if found is None or not losses:
            return
        if found.bad:
            for name, why in found.bad.items():
                if name in self.nodes:
                    self._training.find(name, why, True)
                    self._lose_node(name, why, True)
            for loss in losses:
                loss.hunted = False
            return
        if found.chosen.kind != "join" or not found.nodes:
            self._instead = (found.chosen, min(loss.noticed for loss in losses))
            self._means.wake.set()
            return
        for loss, node in zip(losses, found.nodes, strict=False):
            loss.node, loss.nodes_ready = node, time.time()
        if any(loss.at_fault for loss in losses):
            self._means.events.write("nodes_ready", nodes=list(found.nodes))
        for loss in losses:
            if loss.node:
                self._join(loss, found)
            else:
                loss.hunted = False

    def _join(self, loss: Loss, found: Found) -> None:
        means, number = self._means, len(self._carriers)
        slots = tuple(
            msgspec.structs.replace(slot, node=loss.node) if slot.rank == loss.slot.rank else slot
            for slot in self._world.slots
        )
        self._world = msgspec.structs.replace(self._world, slots=slots)
        slot = msgspec.structs.replace(slots[loss.slot.rank], seats=loss.seats)
        if slot.rank == 0:
            self._master = found.addresses[loss.node]
        variables = join_variables(
            self._variables,
            self._world,
            slot,
            job_nodes=found.job_nodes,
            master_address=self._master,
            incarnation=1 + max(self._seen.incarnation.get(seat, 0) for seat in loss.seats),
            step=number,
        )
        tasks = self._world.tasks(slot)
        command = join_command(means.command, means.allocation.id, self._world, slot, tasks)
        argv, environment = means.launch.line(
            command,
            variables,
            srun_environment(means.environment, found.job_nodes, means.allocation.changed),
        )
        self._training.forget(loss.node)
        means.events.write("joining", nodes=[loss.node], seats=list(loss.seats))
        with means.person.starting:
            step = Step(argv, environment, means.wake.set, on_news=means.wake.set)
            means.person.steps.append(step)
        self._carriers.append(Carrier(step, number, loss.seats))
        loss.started = time.time()
        for seat in loss.seats:
            self._joined_at[seat] = time.monotonic()
        means.link.moved(AttemptStarted(self._attempt.number, self.nodes))

    # -- what became of it --------------------------------------------------------------------

    def _goes_on(self, picture: Picture, since: int) -> bool:
        running = set(picture.running)
        return picture.generation > since and bool(running) and running >= self._alive(picture)

    def _look_at_losses(self, picture: Picture) -> None:
        for loss in list(self._losses):
            if not loss.went_on and self._goes_on(picture, loss.generation):
                loss.went_on = time.time()
                after = loss.went_on - loss.noticed
                size = len(picture.running)
                report.say(f"{size} of {self._world.seats} seats went on after {after:.1f} s")
                self._means.events.write("went_on", seats=size)
            if loss.started and self._has_joined(picture, loss):
                self._losses.remove(loss)
                self._training.forget(loss.slot.node)
                self._tell(loss, picture)

    def _has_joined(self, picture: Picture, loss: Loss) -> bool:
        new = {peer.seat for peer in picture.peers if peer.id not in loss.peers}
        seats = set(loss.seats)
        return seats <= new and seats <= set(picture.running)

    def _tell(self, loss: Loss, picture: Picture) -> None:
        now = time.time()
        self._means.events.write("joined", nodes=[loss.node], seats=list(loss.seats))
        seats = ",".join(map(str, loss.seats))
        if loss.at_fault:
            done = f"{loss.slot.node} exchanged for {loss.node}, which joined as seats {seats}"
        else:
            done = f"seats {seats} were started again on {loss.node}; no node is at fault"
        report.healed(
            report.Healing(
                what=f"{loss.slot.node}: {loss.reason}",
                done=f"{done}; now on {fold(self.nodes)}",
                seats=loss.seats,
                noticed=loss.noticed,
                went_on=loss.went_on,
                nodes_ready=loss.nodes_ready,
                started=loss.started,
                joined=now,
                step=picture.step,
            )
        )
