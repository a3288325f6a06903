"""Decide what a living step does: events and the time in, actions out. Pure.

    lost seats   LOST → SEARCHING → NODE_FOUND → JOINING → FILLED, or EMPTY
    join step    PLANNED → STARTING → CONNECTED → JOINED, or FAILED
    live step    WHOLE ⇄ WAITING ⇄ DEGRADED → ENDING → OVER

`live_step` tells it what happens and carries its actions out, one after the other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from enum import Enum

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.decide.plan import after_task
from slurm_resilience.resume.decide.transitions import advance
from slurm_resilience.resume.live_step.join_step import JoinAttempt, JoinState
from slurm_resilience.resume.live_step.live_events import (
    Absence,
    Action,
    AskEvidence,
    AskToLeave,
    EndAttempt,
    EndJoin,
    EndManner,
    EndSteps,
    Event,
    FaultyNode,
    ForgetNode,
    FoundNodes,
    JoinFailed,
    JoinStarted,
    LeaveJudged,
    LeaveNode,
    NodesFaulty,
    NodesSuspected,
    SayEmpty,
    SayJoined,
    SayJoinFailed,
    SayStalled,
    SayWentOn,
    SearchEnded,
    SearchKind,
    StartJoin,
    StartSearch,
    StepsEnded,
    StopSearches,
    TasksDied,
    TellSuspicion,
    TellTraining,
    Tick,
    TrainingEnded,
    TrainingSeen,
    UserEnded,
)
from slurm_resilience.resume.live_step.loss_record import LossRecord
from slurm_resilience.resume.live_step.losses import LossCause, LostSeats, LostSeatState
from slurm_resilience.resume.live_step.seats import (
    NodeSlot,
    SeatHistory,
    SeatMap,
    StepSeats,
    seats_of_tasks,
)
from slurm_resilience.resume.live_step.stall_watch import (
    StallWatch,
    living_seats,
    steps_without,
)
from slurm_resilience.resume.live_step.task_deaths import FailedLaunches, TaskDeaths

MOST_DOUBLINGS = 10
JOIN_SECONDS = 1800.0
"""A join step's processes have to be seen within this time (they import, and build the model),
and to step with the others within as long again."""

TAKEN_SECONDS = 300.0
"""For the others to step without the seats of a node that a person took out of the job."""

GONE_SECONDS = 30.0
"""A task that ended has its processes' connections closed within this time; one that still has
them lives, whatever was printed of it."""
LOOK_SECONDS = 1.0
"""Between two looks for that."""
LONGEST_PAUSE_SECONDS = 120.0
"""Between two tries to start tasks on a node whose slurmd does not take them."""

_WAITED_FOR = {JoinState.STARTING: "were not seen", JoinState.CONNECTED: "did not step"}


class LiveStepState(Enum):
    """The life of a living step."""

    WHOLE = "whole"
    """Every seat is filled."""
    WAITING = "waiting"
    """Seats are lost, and the others do not step (yet)."""
    DEGRADED = "degraded"
    """Seats are lost, and the others step without them."""
    ENDING = "ending"
    """Its sruns are being ended."""
    OVER = "over"


_S = LiveStepState
LIVE_STEP_TRANSITIONS: dict[LiveStepState, frozenset[LiveStepState]] = {
    _S.WHOLE: frozenset({_S.WAITING, _S.ENDING}),
    _S.WAITING: frozenset({_S.DEGRADED, _S.WHOLE, _S.ENDING}),
    _S.DEGRADED: frozenset({_S.WAITING, _S.WHOLE, _S.ENDING}),
    _S.ENDING: frozenset({_S.OVER}),
    _S.OVER: frozenset(),
}


class LivePlan:
    """The decisions for one living attempt."""

    def __init__(self, seat_map: SeatMap, limits: ResumeSettings) -> None:
        """
        Args:
            seat_map: the node of every seat when the step began to live.
            limits: `[resume]` of the configuration.
        """
        self._limits = limits
        self.seat_map = seat_map
        self.steps = StepSeats(range(sum(len(slot.seats) for slot in seat_map.slots)))
        self.state = LiveStepState.WHOLE
        self.record = LossRecord()
        self.lost_peers: set[str] = set()
        """Ids of processes on lost nodes."""
        self._searches: dict[SearchKind, tuple[LostSeats, ...]] = {}
        self._history = SeatHistory()
        self._deaths = TaskDeaths(limits.progress_after)
        self._launches = FailedLaunches(limits.max_per_node)
        self._stall = StallWatch()
        self._seen = TrainingSeen(0, (), -1, ())
        self._kept_nodes: frozenset[str] = frozenset()
        """Nodes that should be left, but there is nowhere to go."""
        self._waiting_since = 0.0
        """When the state or a search or a join step last changed, or tasks died."""
        self._finish: EndAttempt | None = None
        """The last action, once all steps have ended."""

    def step(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take an event in; return what is to be done, in this order.

        Args:
            event: what happened.
            now: monotonic seconds.
        """
        if self.state is _S.OVER:
            return ()
        if self.state is _S.ENDING:
            return tuple(self._when_ending(event))
        return tuple(self._when_living(event, now))

    def next_deadline(self) -> float | None:
        """Return when the next `Tick` is due at the latest; None: no time is waited for."""
        dues = [loss.due for loss in self.record.losses if loss.state is LostSeatState.DIAGNOSING]
        return min(dues, default=None)

    def _when_living(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case TrainingSeen():
                yield from self._on_training_seen(event, now)
            case NodesFaulty():
                yield from self._on_nodes_faulty(event, now)
            case NodesSuspected():
                yield from self._on_nodes_suspected(event)
            case LeaveJudged():
                yield from self._on_leave_judged(event, now)
            case TasksDied():
                yield from self._on_tasks_died(event, now)
            case SearchEnded():
                yield from self._on_search_ended(event, now)
            case JoinStarted() | JoinFailed():
                yield from self._on_join_result(event, now)
            case Absence(seconds):
                self._put_off(seconds)
            case Tick():
                yield from self._on_tick(now)
            case UserEnded() | TrainingEnded() | StepsEnded():
                yield from self._on_end(event)

    # -- the training -------------------------------------------------------------------------

    def _on_training_seen(self, seen: TrainingSeen, now: float) -> Iterator[Action]:
        self._seen = seen
        self._history.note(seen.peers, seen.running, seen.generation, seen.step)
        for join in self.record.joins:
            if join.state is JoinState.STARTING and self._is_seen(join):
                join.enter(JoinState.CONNECTED)
                join.deadline = now + JOIN_SECONDS
        for loss in self.record.losses:
            if not loss.pending and loss.state is not LostSeatState.EMPTY:
                continue
            if loss.went_on is None and self._others_step(loss.before.generation):
                loss.went_on = now
                running, seats = len(seen.running), self.seat_map.seats
                yield SayWentOn(running, seats, now - loss.noticed)
            if loss.state is LostSeatState.JOINING and self._has_joined(loss):
                yield from self._fill(loss, now)
            elif loss.state is LostSeatState.EMPTY and self._has_new_processes(loss):
                loss.enter(LostSeatState.FILLED)
        self._update_state(now)

    def _fill(self, loss: LostSeats, now: float) -> Iterator[Action]:
        loss.enter(LostSeatState.FILLED)
        loss.filled = now
        self._launches.launched()
        join = self.record.join_of(loss.step)
        if join.state is JoinState.STARTING:
            join.enter(JoinState.CONNECTED)
        join.enter(JoinState.JOINED)
        yield ForgetNode(loss.slot.node)
        yield SayJoined(loss, self.seat_map.nodes, self._seen.step)

    def _others_step(self, since: int) -> bool:
        return steps_without(self._seen, since, self.lost_peers)

    def _is_alive(self, loss: LostSeats) -> bool:
        return living_seats(self._seen, self.lost_peers).issuperset(loss.seats)

    def _has_new_processes(self, loss: LostSeats) -> bool:
        new = {peer.seat for peer in self._seen.peers if peer.id not in loss.before.peers}
        return new.issuperset(loss.seats)

    def _is_seen(self, join: JoinAttempt) -> bool:
        loss = self.record.losses[join.loss]
        return any(
            peer.seat in join.seats and peer.id not in loss.before.peers
            for peer in self._seen.peers
        )

    def _has_joined(self, loss: LostSeats) -> bool:
        return self._has_new_processes(loss) and set(loss.seats) <= set(self._seen.running)

    # -- what is lost -------------------------------------------------------------------------

    def _on_nodes_faulty(self, event: NodesFaulty, now: float) -> Iterator[Action]:
        lost = self.record.lost_nodes() | self.record.taken_nodes()
        nodes = tuple(
            faulty
            for faulty in event.nodes
            if faulty.node not in lost and self.seat_map.slot_of(faulty.node) is not None
        )
        any_dead = any(faulty.dead for faulty in nodes)
        kept = not any_dead and frozenset(faulty.node for faulty in nodes) == self._kept_nodes
        if not nodes or kept:
            return
        for faulty in nodes:
            if faulty.dead:
                # Before anything else: the others wait for it.
                yield TellTraining(faulty)
        if any_dead:
            yield from self._leave(nodes, now)
        else:
            yield AskToLeave(nodes)

    def _on_nodes_suspected(self, event: NodesSuspected) -> Iterator[Action]:
        lost = self.record.lost_nodes() | self.record.taken_nodes()
        for suspect in event.nodes:
            if suspect.node not in lost and self.seat_map.slot_of(suspect.node) is not None:
                yield TellSuspicion(suspect)

    def _on_leave_judged(self, event: LeaveJudged, now: float) -> Iterator[Action]:
        if event.allowed:
            yield from self._leave(event.nodes, now)
        else:
            self._kept_nodes = frozenset(faulty.node for faulty in event.nodes)

    def _leave(self, nodes: tuple[FaultyNode, ...], now: float) -> Iterator[Action]:
        for faulty in nodes:
            slot = self.seat_map.slot_of(faulty.node)
            if slot is None or faulty.node in self.record.lost_nodes():
                continue  # it was left meanwhile
            if not faulty.dead:
                yield TellTraining(faulty)
            yield from self._lose_node(faulty, slot, now)
        self._update_state(now)

    def _lose_node(self, faulty: FaultyNode, slot: NodeSlot, now: float) -> Iterator[Action]:
        steps = tuple(n for n in range(len(self.steps)) if self.steps.held_by(n) & set(slot.seats))
        before = sum(
            loss.slot.node == slot.node and loss.cause.blames_node for loss in self.record.losses
        )
        unfit = self._launches.is_unfit(slot.node)
        for_good = unfit or before + 1 >= self._limits.max_per_node
        yield LeaveNode(faulty, slot, steps, len(self.steps), for_good, unfit)
        # A join step that was on its way to this node is lost with it.
        self.record.give_up([loss for loss in self.record.losses if loss.slot.rank == slot.rank])
        cause = LossCause.NODE_UNFIT if unfit else LossCause.NODE_MARKED
        cause = LossCause.NODE_DEAD if faulty.dead else cause
        loss = self._new_loss(slot, slot.seats, cause, faulty.reason, now)
        self.lost_peers |= loss.before.peers

    def _on_tasks_died(self, event: TasksDied, now: float) -> Iterator[Action]:
        numbers = self.steps.all_of(event.step)
        died = seats_of_tasks(numbers, self.seat_map.per_task, event.tasks)
        lost = {seat for loss in self.record.losses if loss.without_node for seat in loss.seats}
        held = self.steps.held_by(event.step) - lost
        for slot in self.seat_map.slots:
            here = tuple(seat for seat in slot.seats if seat in died and seat in held)
            if here:
                self._waiting_since = now
                yield from self._lose_tasks(slot, here, event.reason, now)
                if event.not_launched:
                    self._put_off_launch(self.record.losses[-1], now)
        self._update_state(now)

    def _put_off_launch(self, loss: LostSeats, now: float) -> None:
        """Wait longer each time for a slurmd that takes no task: it is started anew, say."""
        loss.cause = LossCause.NOT_LAUNCHED
        times = self._launches.count(loss.slot.node)
        if times > 1:
            pause = self._limits.backoff * 2.0 ** min(times - 2, MOST_DOUBLINGS)
            loss.due = max(loss.due, now + min(pause, LONGEST_PAUSE_SECONDS))

    def _lose_tasks(
        self, slot: NodeSlot, seats: tuple[int, ...], reason: str, now: float
    ) -> Iterator[Action]:
        """Wait a moment, in which the node may be found to be at fault; then start the tasks again
        on it."""
        # Those that were on their way, and died.
        self.record.give_up([loss for loss in self.record.losses if set(loss.seats) <= set(seats)])
        self.record.leave_out(seats)
        loss = self._new_loss(slot, seats, LossCause.TASKS_DIED, reason, now)
        loss.due = now + self._limits.diagnosis_wait
        yield AskEvidence(slot.node)

    def _new_loss(
        self, slot: NodeSlot, seats: tuple[int, ...], cause: LossCause, reason: str, now: float
    ) -> LostSeats:
        state = LostSeatState.LOST if cause.blames_node else LostSeatState.DIAGNOSING
        number = len(self.record.losses)
        before = self._history.record(seats)
        loss = LostSeats(number, slot, seats, cause, reason, now, before, state=state)
        self.record.losses.append(loss)
        return loss

    # -- searches -----------------------------------------------------------------------------

    def _on_tick(self, now: float) -> Iterator[Action]:
        for loss in self.record.losses:
            if loss.state is not LostSeatState.DIAGNOSING or loss.due > now:
                continue
            is_shown = self._is_alive(loss) and not self._has_new_processes(loss)
            if is_shown and now - loss.noticed < GONE_SECONDS:
                loss.due = now + LOOK_SECONDS
            else:
                loss.enter(LostSeatState.LOST)
        yield from self._end_late_joins(now)
        for kind in SearchKind:
            yield from self._search(kind, now)
            if self.state is _S.ENDING:
                return
        self._update_state(now)
        yield from self._tell_stall(now)
        yield from self._end_hopeless(now)

    def _put_off(self, seconds: float) -> None:
        """Put all limits off that would be over by an absence of the supervisor: what it waits for
        may have come, and is seen a moment later."""
        self._waiting_since += seconds
        for join in self.record.joins:
            join.deadline += seconds
        for loss in self.record.losses:
            loss.due += seconds

    def _tell_stall(self, now: float) -> Iterator[Action]:
        is_over = self.state is _S.WAITING
        waiting = self._stall.look(self._seen, self.lost_peers, now, is_over=is_over)
        if waiting is not None:
            unfilled = [loss for loss in self.record.losses if loss.pending]
            lost = sorted({seat for loss in unfilled for seat in loss.seats})
            yield SayStalled(waiting, tuple(lost), self._stall.seconds(now))

    def _search(self, kind: SearchKind, now: float) -> Iterator[Action]:
        by_node = kind is SearchKind.NODES
        lost = [
            loss
            for loss in self.record.losses
            if loss.state is LostSeatState.LOST and loss.cause.blames_node is by_node
        ]
        if not lost or kind in self._searches:
            return
        if not by_node:
            lost = yield from self._tasks_to_restart(lost, now)
            if self.state is _S.ENDING:
                return
        for loss in lost:
            loss.enter(LostSeatState.SEARCHING)
        if lost:
            self._searches[kind] = tuple(lost)
            yield StartSearch(
                kind,
                tuple(_faulty(loss) for loss in lost),
                self._living_nodes(),
                len({*self.seat_map.nodes} - self.record.taken_nodes()),
                max(loss.before.generation for loss in lost),
                tuple(_faulty(loss) for loss in lost if self._is_unfit(loss)),
            )

    def _is_unfit(self, loss: LostSeats) -> bool:
        """Return whether a node takes no task of ours, and not for a moment only."""
        by_launch = loss.cause is LossCause.NOT_LAUNCHED
        return by_launch and self._launches.blames_node(loss.slot.node)

    def _tasks_to_restart(
        self, lost: list[LostSeats], now: float
    ) -> Generator[Action, None, list[LostSeats]]:
        """Return the losses to look for; leave those empty whose tasks died too often."""
        chosen = []
        taken = self.record.taken_nodes()
        yield from self._give_up_taken(lost, dict.fromkeys(taken, "its node was taken out"))
        for loss in lost:
            if loss.slot.node in taken:
                continue
            if self._is_alive(loss):
                loss.enter(LostSeatState.FILLED)  # by their own launcher
                continue
            if loss.cause is LossCause.NOT_LAUNCHED and self.state is _S.DEGRADED:
                # The program has not died, and the others go on.
                chosen.append(loss)
                continue
            row = self._deaths.died(loss.seats, now, loss.before.step)
            plan = after_task(row.in_row, self._limits, row.in_all)
            if plan.kind == "join":
                chosen.append(loss)
                continue
            reason = f"{loss.reason}; {plan.reason}"
            if self.seat_map.needs_all:
                yield from self._end_for([loss], reason)
                break
            loss.enter(LostSeatState.EMPTY)
            yield SayEmpty(loss.seats, reason)
        return chosen

    def _living_nodes(self) -> tuple[str, ...]:
        lost = self.record.lost_nodes() | self.record.taken_nodes()
        return tuple(name for name in self.seat_map.nodes if name not in lost)

    def _on_search_ended(self, event: SearchEnded, now: float) -> Iterator[Action]:
        losses = self._searches.pop(event.kind, ())
        self._waiting_since = now
        found = event.found
        waiting = [loss for loss in losses if loss.state is LostSeatState.SEARCHING]
        if found is None or found.bad or found.taken or not waiting:
            for loss in waiting:
                loss.enter(LostSeatState.LOST)
            yield from self._give_up_taken(waiting, found.taken if found else {})
            if self.state is _S.ENDING:
                return
            for name, reason in (found.bad if found else {}).items():
                yield from self._leave((FaultyNode(name, reason, False),), now)
        elif found.chosen.kind != "join":
            yield from self._without_nodes(waiting, f"no node can join ({found.chosen.reason})")
        else:
            node_of = dict(zip((loss.number for loss in losses), found.nodes, strict=False))
            for loss in waiting:
                node = node_of.get(loss.number)
                if node is None:
                    loss.enter(LostSeatState.LOST)
                else:
                    yield from self._join(loss, node, found, now)

    def _without_nodes(self, losses: list[LostSeats], reason: str) -> Iterator[Action]:
        """End the step, unless the others go on and no node is at fault."""
        goes_on = self.state is _S.DEGRADED and not self.seat_map.needs_all
        if not (goes_on and all(loss.cause is LossCause.NODE_UNFIT for loss in losses)):
            yield from self._end_for(losses, reason)
            return
        for loss in losses:
            loss.enter(LostSeatState.LOST)
            loss.enter(LostSeatState.EMPTY)
            yield SayEmpty(loss.seats, f"{loss.slot.node}: {loss.reason}; {reason}")

    def _give_up_taken(self, losses: list[LostSeats], taken: dict[str, str]) -> Iterator[Action]:
        """Leave the seats empty whose node a person has taken out of the job: another one in its
        place would undo that."""
        for loss in losses:
            reason = taken.get(loss.slot.node)
            if reason is None:
                continue
            loss.cause = LossCause.TAKEN_OUT
            if self.seat_map.needs_all:
                yield from self._end_for([loss], reason)
                return
            loss.enter(LostSeatState.EMPTY)
            yield SayEmpty(loss.seats, reason)

    # -- join steps ---------------------------------------------------------------------------

    def expected_join(self, node: str, found: FoundNodes) -> StartJoin | None:
        """Return the join step that follows if a node is lost, and nothing else is; None: none.

        Args:
            node: it may be lost soon.
            found: the node that would take its part over.
        """
        slot = self.seat_map.slot_of(node)
        if slot is None or node in self.record.lost_nodes() or not found.nodes:
            return None
        return self._join_of_slot(slot, len(self.steps), found.nodes[0], found)

    def _join_of_slot(self, slot: NodeSlot, step: int, node: str, found: FoundNodes) -> StartJoin:
        return StartJoin(
            step,
            NodeSlot(slot.rank, node, slot.seats),
            self.seat_map.moved(slot.rank, node),
            found,
            self._history.next_incarnation(slot.seats),
            new_machine=True,
        )

    def _join(self, loss: LostSeats, node: str, found: FoundNodes, now: float) -> Iterator[Action]:
        loss.enter(LostSeatState.NODE_FOUND)
        loss.node, loss.nodes_ready = node, now
        self.seat_map = self.seat_map.moved(loss.slot.rank, node)
        loss.step = self.steps.add(loss.seats)
        self.record.joins.append(
            JoinAttempt(loss.step, loss.number, loss.seats, now + JOIN_SECONDS)
        )
        yield ForgetNode(node)
        yield StartJoin(
            loss.step,
            NodeSlot(loss.slot.rank, node, loss.seats),
            self.seat_map,
            found,
            self._history.next_incarnation(loss.seats),
            loss.cause.blames_node,
        )

    def _on_join_result(self, event: JoinStarted | JoinFailed, now: float) -> Iterator[Action]:
        join = self.record.join_of(event.step)
        if join.state is not JoinState.PLANNED:
            return  # its node was lost meanwhile
        loss = self.record.losses[join.loss]
        loss.enter(LostSeatState.JOINING)
        self._deaths.joined(loss.seats, now)
        self._waiting_since = now
        if isinstance(event, JoinStarted):
            join.enter(JoinState.STARTING)
            loss.started = now
        else:
            yield from self._fail(loss, event.reason, now)

    def _end_late_joins(self, now: float) -> Iterator[Action]:
        starting = any(join.state is JoinState.STARTING for join in self.record.joins)
        others_are_awaited = self.state is _S.WAITING and (self._searches or starting)
        for join in self.record.joins:
            if join.state is JoinState.CONNECTED and others_are_awaited:
                # The training may need the other seats too: its time begins when they are there.
                join.deadline = now + JOIN_SECONDS
            if join.state in _WAITED_FOR and now >= join.deadline:
                reason = f"its processes {_WAITED_FOR[join.state]} within {JOIN_SECONDS:.0f} s"
                yield from self._fail(self.record.losses[join.loss], reason, now)
                yield EndJoin(join.step)

    def _fail(self, loss: LostSeats, reason: str, now: float) -> Iterator[Action]:
        yield SayJoinFailed(loss.seats, loss.node, reason)
        slot = self.seat_map.slots[loss.slot.rank]
        yield from self._lose_tasks(slot, loss.seats, reason, now)

    # -- the end ------------------------------------------------------------------------------

    def _update_state(self, now: float) -> None:
        unfilled = self.record.unfilled
        since = max((loss.before.generation for loss in unfilled), default=0)
        if not unfilled:
            state = _S.WHOLE
        elif self._seen.running and self._seen.generation > since:
            state = _S.DEGRADED
        else:
            state = _S.WAITING
        if state is self.state:
            return
        if self.state is _S.WHOLE and state is _S.DEGRADED:
            self.state = advance(LIVE_STEP_TRANSITIONS, self.state, _S.WAITING)
        self.state = advance(LIVE_STEP_TRANSITIONS, self.state, state)
        self._waiting_since = now

    def _end_hopeless(self, now: float) -> Iterator[Action]:
        """End a step of which no seat steps, after as long as an idle node is waited for. A search
        and a join step have limits of their own."""
        waited = now - self._waiting_since
        under_way = self._searches or any(join.state in _WAITED_FOR for join in self.record.joins)
        unfilled = [loss for loss in self.record.losses if loss.pending]
        longest = self._limits.swap_wait
        if self.record.taken_nodes() and not unfilled:
            longest = min(longest, TAKEN_SECONDS)  # no node is on its way
        if self.state is _S.WAITING and not under_way and waited > longest:
            yield from self._end_for(unfilled, f"no seat has stepped for {waited:.0f} s")

    def _end_for(self, losses: list[LostSeats], reason: str) -> Iterator[Action]:
        dead = any(loss.cause is LossCause.NODE_DEAD for loss in self.record.losses if loss.pending)
        noticed = min((loss.noticed for loss in losses), default=None)
        finish = EndAttempt(
            0, None, self.record.faulty_nodes(), stopped_by_us=True, noticed=noticed
        )
        self._begin_end(finish)
        yield EndSteps(EndManner.AT_ONCE if dead else EndManner.WITH_GRACE, reason)

    def _on_end(self, event: UserEnded | TrainingEnded | StepsEnded) -> Iterator[Action]:
        faulty = self.record.faulty_nodes()
        match event:
            case TrainingEnded(code, training_step, reason, seats):
                self._history.last_world = seats
                at = f" at step {training_step}" if training_step >= 0 else ""
                text = f"the training ended{at}: {reason}" if code else ""
                self._begin_end(EndAttempt(0, code, faulty, reported_by_training=True))
                yield StopSearches()
                yield EndSteps(EndManner.BY_THEMSELVES if code else EndManner.IN_THEIR_TIME, text)
            case UserEnded(step):
                self._begin_end(EndAttempt(step, None, faulty))
                yield StopSearches()
                yield EndSteps(EndManner.WITH_GRACE, "")
            case StepsEnded(codes):
                worst = max(sorted(codes), key=lambda number: codes[number])
                pending = self.record.any_pending
                self._begin_end(EndAttempt(worst, codes[worst] or int(pending), faulty))
                yield from self._when_ending(event)

    def _begin_end(self, finish: EndAttempt) -> None:
        self.state = advance(LIVE_STEP_TRANSITIONS, self.state, _S.ENDING)
        self._finish = finish

    def _when_ending(self, event: Event) -> Iterator[Action]:
        if isinstance(event, TrainingSeen):
            self._history.note(event.peers, event.running, event.generation, event.step)
        if isinstance(event, StepsEnded) and self._finish is not None:
            self.state = advance(LIVE_STEP_TRANSITIONS, self.state, _S.OVER)
            yield StopSearches()
            step, code = event.failed
            yield (
                EndAttempt(step, code, self._finish.faulty | event.faulty, late_code=code)
                if code
                else self._finish
            )

    @property
    def kept_nodes(self) -> frozenset[str]:
        """Return the nodes that should be left, but there is nowhere to go."""
        return self._kept_nodes

    def seats_left_out(self) -> set[int]:
        """Return the seats without which the others stepped last: those that are known to be lost,
        or all that were not in the last world, where it told who was."""
        if self._history.last_world:
            return set(range(self.seat_map.seats)) - self._history.last_world
        return self.record.lost_seats() - self.seats_lost_at_end()

    def seats_lost_at_end(self) -> set[int]:
        """Return the seats that are lost, and without which no world has stepped yet.

        Where the training has ended well, they were lost after it: no world ends well without one
        of its processes. Its last world may be over before it is seen; then it told who was in it.
        """
        if self._history.last_world:
            return self.record.lost_seats() & self._history.last_world
        return self.record.lost_seats(self._history.newest)


def _faulty(loss: LostSeats) -> FaultyNode:
    return FaultyNode(loss.slot.node, loss.reason, loss.cause is LossCause.NODE_DEAD)
