"""Keep a living step alive: tell `live_plan` what happens, and carry its actions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Event as ThreadEvent

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.resume import fence, report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.classify import describe
from slurm_resilience.resume.decide.signatures import Category
from slurm_resilience.resume.elastic.awake_time import AwakeTime
from slurm_resilience.resume.elastic.growth import Growth
from slurm_resilience.resume.live_step import live_events as ev
from slurm_resilience.resume.live_step import node_search
from slurm_resilience.resume.live_step.join_step import (
    join_command,
    join_environment,
    join_numbers,
    join_variables,
)
from slurm_resilience.resume.live_step.live_plan import GONE_SECONDS, LivePlan
from slurm_resilience.resume.live_step.live_steps import (
    END_LOOK_SECONDS,
    RELEASE_SECONDS,
    REPORT_SECONDS,
    EndWord,
    LiveSteps,
    StepEnd,
)
from slurm_resilience.resume.live_step.losses import LostSeats
from slurm_resilience.resume.live_step.node_search import NodeSearch
from slurm_resilience.resume.live_step.preparation import Preparation
from slurm_resilience.resume.live_step.seats import SeatMap
from slurm_resilience.resume.live_step.stall_watch import living_seats, steps_without
from slurm_resilience.resume.live_step.training import read_outcome
from slurm_resilience.resume.progress.hang_evidence import FoundHang
from slurm_resilience.resume.srun.environment import Attempt, srun_environment, task_variables
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.task_labels import TaskNumbers
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.messages import AttemptStarted, LeftNode, NodeVerdict, WrongResults

LOOK_SECONDS = 1.0
"""Between two looks when there is no news."""
MEND_SECONDS = 10.0
"""Between two looks whether the fence stands."""
LATE_LINE_SECONDS = 600.0
"""Between two lines that a program still runs whose training has ended."""


class LooksBeside:
    """Has looked from time to time at what no event of the training tells."""

    def __init__(
        self,
        mend: Callable[[], None],
        left: fence.LeftNodes,
        find_hang: Callable[[bool], FoundHang | None],
        now: float,
    ) -> None:
        """
        Args:
            mend: puts the fence up again where it is gone.
            left: the nodes that the step has left.
            find_hang: returns the hang for which the step is to be ended. It is told whether all
                seats are filled: while one is not, no rank steps.
            now: monotonic seconds.
        """
        self._mend = mend
        self.left = left
        self.find_hang = find_hang
        self._mended = now
        self._time = AwakeTime()

    def absence(self, now: float) -> float:
        """Return the seconds of an absence of the supervisor between the last call and this one; 0:
        there was none.

        Args:
            now: monotonic seconds.
        """
        before = self._time.away
        self._time.at(now)
        return self._time.away - before

    def look(self, now: float) -> None:
        """Mend the fence if it is time."""
        if now - self._mended > MEND_SECONDS:
            self._mended = now
            self._mend()
            self.left.write()


class LiveStep:
    """One attempt that lives on."""

    def __init__(
        self,
        context: SupervisorContext,
        observer: Observer,
        rendezvous: Path,
        seat_map: SeatMap,
        attempt: Attempt,
        step: SrunStep,
        *,
        can_leave: Callable[[Mapping[str, NodeVerdict]], bool],
        mend_fence: Callable[[], None],
        find_hang: Callable[[bool], FoundHang | None],
        addresses: Mapping[str, str],
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            observer: of the running training.
            rendezvous: where it meets.
            seat_map: the node of every seat.
            attempt: what was started.
            step: its first step.
            can_leave: tells whether there is anywhere to go from nodes that still work.
            mend_fence: called from time to time.
            find_hang: as `LooksBeside` has it.
            addresses: of the nodes, by name.
        """
        self._context = context
        self._observer = observer
        self._rendezvous = rendezvous
        self._attempt = attempt
        self._master_address = attempt.master_address
        self._can_leave = can_leave
        left = fence.LeftNodes(attempt.directory, context.host_calls)
        self._beside = LooksBeside(mend_fence, left, find_hang, context.clock.monotonic())
        self._addresses = dict(addresses)
        self._plan = LivePlan(seat_map, context.limits)
        self._steps = LiveSteps(context, step, self._plan.steps, seat_map.per_task)
        self._searches: dict[ev.SearchKind, NodeSearch] = {}
        self._preparation = Preparation(context, attempt.directory)
        size = context.allocation.companions.size
        self._growth = (
            Growth(context, observer, size, attempt, left, seat_map, self._plan.steps)
            if size
            else None
        )
        self._answers: deque[ev.Event] = deque()
        """Events that follow from actions: taken before anything else is looked at."""
        self._end: StepEnd | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the training's nodes, by NODE_RANK."""
        return self._plan.seat_map.nodes

    @property
    def seat_map(self) -> SeatMap:
        """Return the node of each seat, as it is now."""
        return self._plan.seat_map

    @property
    def stopped(self) -> dict[str, float]:
        """Return the seconds in which no seat stepped, by the kind of fault, of mended losses."""
        stopped: dict[str, float] = {}
        for loss in self._plan.record.losses:
            if loss.filled is not None:
                kind = Category.HARDWARE if loss.cause.blames_node else Category.UNKNOWN
                again = loss.filled if loss.went_on is None else loss.went_on
                stopped[kind.value] = stopped.get(kind.value, 0.0) + again - loss.noticed
        return stopped

    def watch(self) -> StepEnd:
        """Return how the attempt ended; no step of it is left then."""
        try:
            while self._end is None:
                self._context.wait_for_news(self._pause())
                self._look()
            taken = tuple(sorted(self._plan.record.taken_nodes()))
            return msgspec.structs.replace(self._end, taken=taken)
        finally:
            self._stop_searches()
            self._preparation.end()
            if self._growth is not None:
                self._growth.end(well=self._end is not None and self._end.code == 0)

    def let_go(self) -> StepEnd:
        """Only wait until the attempt is over, without any help."""
        faulty = self._plan.record.faulty_nodes()
        while True:
            outcome = read_outcome(self._rendezvous)
            if outcome is not None and outcome.code == 0:
                return self._end_of_trained(faulty)
            if outcome is not None:
                self._steps.let_end()
                step = self._steps.step(0)
                return StepEnd(outcome.code, step, faulty=faulty, word=EndWord.TRAINING)
            self._steps.release(living_seats(self._training_seen(), self._plan.lost_peers))
            number = self._steps.ended_by_user()
            if number is not None:
                self._steps.end(at_once=False)
                step = self._steps.step(number)
                return StepEnd(step.code, step, faulty=faulty, word=self._steps.word_at_end())
            if not self._steps.running:
                codes = self._steps.codes()
                number = max(sorted(codes), key=lambda step: codes[step])
                # A step that lost seats has not ended well, whatever its srun says.
                pending = self._plan.record.any_pending
                return StepEnd(
                    codes[number] or int(pending), self._steps.step(number), faulty=faulty
                )
            self._context.wait_for_news(LOOK_SECONDS)

    def _end_of_trained(self, faulty: dict[str, str]) -> StepEnd:
        ended = self._in_their_time()
        number, code = ended.failed
        step = self._steps.step(number)
        if code:
            return StepEnd(code, step, faulty=faulty | ended.faulty, late_code=code)
        return StepEnd(0, step, faulty=faulty, word=EndWord.TRAINING)

    def _pause(self) -> float:
        """Return the seconds until the next look, unless there is news."""
        now = self._context.clock.monotonic()
        self._beside.look(now)
        deadline = self._plan.next_deadline()
        return LOOK_SECONDS if deadline is None else max(0.0, min(LOOK_SECONDS, deadline - now))

    # -- what happens -------------------------------------------------------------------------

    def _look(self) -> None:
        """Tell the plan all that is new; no more once the attempt is over."""
        absence = self._beside.absence(self._context.clock.monotonic())
        if absence:
            self._tell(ev.Absence(absence))
        self._preparation.look()
        for look in (
            self._look_at_training,
            self._look_at_nodes,
            self._look_at_end,
            self._look_at_tasks,
            self._look_at_searches,
            self._look_at_growth,
            self._look_at_steps,
        ):
            look()
            if self._end is not None:
                return
        self._tell(self._training_seen())
        self._tell(ev.Tick())

    def _training_seen(self) -> ev.TrainingSeen:
        picture = self._observer.picture()
        # A seat does not step because its last process, on a lost node, still looks as if it did.
        inside = picture.inside - self._plan.lost_peers
        running = {peer.seat for peer in picture.peers if peer.id in inside}
        return ev.TrainingSeen(
            picture.generation, tuple(sorted(running)), picture.step, picture.peers
        )

    def _look_at_training(self) -> None:
        for node, reason in self._observer.take_wrong_nodes().items():
            # The training has healed itself: that a chip is faulty is for people to find out.
            self._context.link.send(WrongResults(node, reason))
        self._tell(self._training_seen())

    def _look_at_steps(self) -> None:
        """End the attempt where its program hangs, and cannot find that by itself."""
        is_whole = not self._plan.record.any_pending
        hang = self._beside.find_hang(is_whole)
        if hang is None or read_outcome(self._rendezvous) is not None:
            return
        noticed = self._context.clock.now()
        self._steps.end(at_once=False)
        step = self._steps.step(0)
        word = self._steps.word_at_end()
        self._end = StepEnd(step.code, step, True, {}, noticed, word, hang=hang)

    def _look_at_nodes(self) -> None:
        known = {
            name: ev.FaultyNode(name, verdict.reason, verdict.verdict == "dead")
            for name, verdict in self._context.link.faulty().items()
        }
        faulty = {name: node for name, node in known.items() if name in self.nodes}
        if self._growth is not None:
            faulty = self._evacuate(self._growth, known, faulty)
        given_up = list(self._steps.failed_nodes())
        for slot in self._plan.seat_map.slots:
            shown = faulty.get(slot.node)
            if shown is not None and shown.dead:
                continue
            if any(node == slot.node and seats & set(slot.seats) for node, seats in given_up):
                faulty[slot.node] = ev.FaultyNode(slot.node, "Slurm gave it up", True)
        suspects = [
            ev.FaultyNode(verdict.node, verdict.reason, False)
            for verdict in self._context.link.take_suspects()
            if verdict.node not in faulty
        ]
        if suspects:
            self._tell(ev.NodesSuspected(tuple(suspects)))
        for suspect in suspects:
            if self._growth is not None and suspect.node in self._growth.nodes:
                self._observer.suspect(suspect.node, suspect.reason)
        if faulty:
            self._tell(ev.NodesFaulty(tuple(faulty.values())))

    def _evacuate(
        self,
        growth: Growth,
        known: Mapping[str, ev.FaultyNode],
        faulty: Mapping[str, ev.FaultyNode],
    ) -> dict[str, ev.FaultyNode]:
        """Return the nodes of the core that are left now: those that are sick and work are kept
        until another one is in.

        Args:
            growth: of this step.
            known: all nodes that must be left.
            faulty: those of the core.
        """
        growth.lose(node for node in known.values() if node.dead)
        self._plan.lost_peers |= growth.lost_peers
        here = {*self.nodes, *growth.nodes} - self._plan.kept_nodes
        here -= self._plan.record.taken_nodes()
        sick = {name: node for name, node in known.items() if name in here and not node.dead}
        for name, reason in self._plan.record.evacuated_nodes().items():
            sick.setdefault(name, ev.FaultyNode(name, reason, False))
        growth.tell_sick(sick.values())
        return {name: node for name, node in faulty.items() if node.dead or growth.may_leave(name)}

    def _look_at_end(self) -> None:
        outcome = read_outcome(self._rendezvous)
        if outcome is not None:
            seats = frozenset(outcome.seats)
            self._tell(ev.TrainingEnded(outcome.code, outcome.step, outcome.reason, seats))
            return
        self._steps.release(living_seats(self._training_seen(), self._plan.lost_peers))
        number = self._steps.ended_by_user()
        if number is not None:
            self._tell(ev.UserEnded(number))
        elif not self._steps.running:
            self._tell(ev.StepsEnded(self._steps.codes()))

    def _look_at_tasks(self) -> None:
        for number, died, not_launched in self._steps.died():
            self._tell(ev.TasksDied(number, died.tasks, died.how, not_launched))

    def _look_at_searches(self) -> None:
        if self._steps.may_be_ending:
            return  # nothing is started beside a step that a person has cancelled
        for kind, search in list(self._searches.items()):
            if search.over and self._end is None:
                del self._searches[kind]
                self._tell(ev.SearchEnded(kind, search.found))

    def _look_at_growth(self) -> None:
        if self._growth is not None:
            taken = len(self._plan.record.taken_nodes())
            seat_map, address = self._plan.seat_map, self._master_address
            self._growth.look(self._training_seen(), seat_map, address, taken)

    def _tell(self, event: ev.Event) -> None:
        """Take an event to the plan, and do what it says, until nothing more follows from it."""
        self._answers.append(event)
        while self._answers:
            now = self._context.clock.monotonic()
            for action in self._plan.step(self._answers.popleft(), now):
                self._do(action)

    # -- what is done -------------------------------------------------------------------------

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.AskToLeave(nodes):
                self._answers.append(ev.LeaveJudged(nodes, self._may_leave(nodes)))
            case ev.TellTraining(node):
                self._observer.find(node.node, node.reason, node.dead)
            case ev.TellSuspicion(node):
                if self._plan.seat_map.needs_all:
                    # A plain program would lose work by a false alarm: others only get ready.
                    self._prepare(node)
                else:
                    self._observer.suspect(node.node, node.reason)
                self._context.events.write("suspected", nodes=[node.node])
            case ev.ForgetNode(name):
                self._observer.forget(name)
            case ev.LeaveNode():
                self._leave_node(action)
            case ev.AskEvidence(name):
                self._context.link.ask_checks((name,), self._context.limits.check_wait)
            case ev.StartSearch():
                self._start_search(action)
            case ev.StartJoin():
                self._start_join(action)
            case ev.EndJoin(step):
                self._steps.end_one(step)
            case _:
                self._do_report_or_end(action)

    def _do_report_or_end(self, action: ev.Action) -> None:
        match action:
            case ev.SayWentOn(running, seats, seconds):
                report.say(f"{running} of {seats} seats went on after {seconds:.1f} s")
                self._context.events.write("went_on", seats=running)
            case ev.SayJoined(loss, nodes, training_step):
                self._report_joined(loss, nodes, training_step)
            case ev.SayStalled(waiting, lost, seconds):
                who = f"seats {_listed(waiting)} wait for others" if waiting else "no seat steps"
                why = f"seats {_listed(lost)} are lost" if lost else "no loss is known yet"
                report.say(f"{who} since {seconds:.0f} s; {why}")
            case ev.SayEmpty(seats, reason):
                report.say(f"seats {_listed(seats)} stay empty: {reason}")
            case ev.SayJoinFailed(seats, node, reason):
                report.say(f"the join step of seats {_listed(seats)} on {node} failed: {reason}")
            case ev.StopSearches():
                self._stop_searches()
            case ev.EndSteps():
                self._end_steps(action)
            case ev.EndAttempt():
                self._finish(action)

    def _prepare(self, suspect: ev.FaultyNode) -> None:
        """Have a launcher load its interpreter on the spare that is taken if the node is lost."""
        others = tuple(name for name in self.nodes if name != suspect.node)
        wanted = ev.StartSearch(ev.SearchKind.NODES, (suspect,), others, len(self.nodes), 0)

        def begin(found: ev.FoundNodes) -> None:
            action = self._plan.expected_join(suspect.node, found)
            if action is not None:
                variables = self._variables(action)
                line = partial(self._line, action)
                numbers = self._numbers(action)
                self._preparation.start(action.slot.node, variables, line, numbers)

        self._preparation.look_for_spare(wanted, begin)

    def _may_leave(self, nodes: tuple[ev.FaultyNode, ...]) -> bool:
        return self._can_leave(
            {node.node: NodeVerdict(node.node, "sick", node.reason) for node in nodes}
        )

    def _leave_node(self, action: ev.LeaveNode) -> None:
        name, seats = action.node.node, action.slot.seats
        report.say(f"node {name} must be left ({action.node.reason}); the step goes on without it")
        self._context.events.write("noticed", nodes=[name], seats=list(seats))
        if action.for_good:
            self._context.allocation.suspects.add(name)
            report.say(f"{name} was lost too often (resume.max_per_node): it is not taken again")
        if action.unfit and not action.node.dead:
            self._context.link.send(LeftNode(name, f"left out: {action.node.reason}"))
        self._beside.left.add(name, action.next_step)
        address = self._addresses.get(name, name) if action.node.dead else ""
        self._steps.lose_node(action.steps, address)

    def _start_search(self, action: ev.StartSearch) -> None:
        def others_go_on() -> bool:
            return steps_without(self._training_seen(), action.since, self._plan.lost_peers)

        def search(stop: ThreadEvent) -> ev.FoundNodes | None:
            if action.kind is ev.SearchKind.TASKS:
                return node_search.check_nodes(self._context, action, stop)
            return node_search.replace_nodes(self._context, action, others_go_on, stop)

        context = self._context
        self._preparation.note_as_own()
        start = context.host_calls.start_thread
        self._searches[action.kind] = NodeSearch(search, context.wake.set, start)

    def _start_join(self, action: ev.StartJoin) -> None:
        number = self._steps.ended_by_user()
        if number is not None:
            # Since the last look.
            self._answers.append(ev.UserEnded(number))
            return
        if self._steps.may_be_ending:
            self._answers.append(ev.JoinFailed(action.step, "Slurm tells that it ends a step"))
            return
        context, slot = self._context, action.slot
        if action.new_machine:
            context.events.write("nodes_ready", nodes=[slot.node])
        self._addresses |= action.found.addresses
        variables = self._variables(action)
        self._master_address = variables["MASTER_ADDR"]
        context.events.write("joining", nodes=[slot.node], seats=list(slot.seats))
        if action.new_machine:
            context.link.forgive(slot.node)
        try:
            if not action.new_machine:
                self._steps.end_tasks_left(slot.seats)
            prepared = self._preparation.take(slot.node, variables)
            if prepared is None:
                argv, environment = self._line(action, variables)
                self._steps.start(action.step, argv, environment, self._numbers(action))
            else:
                self._steps.adopt(action.step, prepared)
        except SresError as error:
            self._answers.append(ev.JoinFailed(action.step, str(error)))
            return
        lent = self._growth.nodes if self._growth is not None else ()
        context.link.moved(AttemptStarted(self._attempt.number, (*self.nodes, *lent)))
        self._answers.append(ev.JoinStarted(action.step))

    def _variables(self, action: ev.StartJoin) -> dict[str, str]:
        """Return the variables of a join step's tasks."""
        slot, found = action.slot, action.found
        first = slot.rank == 0
        return join_variables(
            task_variables(self._attempt),
            action.seat_map,
            slot,
            job_nodes=found.job_nodes,
            master_address=found.addresses[slot.node] if first else self._master_address,
            incarnation=action.incarnation,
            step=action.step,
        )

    def _numbers(self, action: ev.StartJoin) -> TaskNumbers | None:
        context = self._context
        return join_numbers(context.command, context.environment, action.seat_map, action.slot)

    def _line(
        self, action: ev.StartJoin, variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return a join step's srun, and its environment."""
        context, nodes = self._context, action.found.job_nodes
        whole = srun_environment(context.environment, nodes, context.allocation.changed)
        return context.launch.line(
            join_command(context.command, context.allocation.id, action.seat_map, action.slot),
            variables,
            join_environment(whole, action.seat_map),
        )

    def _end_steps(self, action: ev.EndSteps) -> None:
        if action.manner is ev.EndManner.IN_THEIR_TIME:
            self._answers.append(self._in_their_time())
            return
        if action.manner is ev.EndManner.BY_THEMSELVES:
            if action.reason:
                report.say(action.reason)
            self._steps.let_end()
        else:
            if action.reason:
                report.say(f"{action.reason}: the step is ended")
            self._steps.end(at_once=action.manner is ev.EndManner.AT_ONCE)
        self._answers.append(ev.StepsEnded(self._steps.codes()))

    def _in_their_time(self) -> ev.StepsEnded:
        """Wait for the end of all steps: the training has ended well, and its program may evaluate,
        save the model, or go on with the next line of a script."""
        context, steps = self._context, self._steps
        steps.begin_last_part()
        began = told = context.clock.monotonic()
        deadline = began + context.limits.grace
        faulty: dict[str, str] = {}
        by_user: int | None = None
        while steps.running:
            context.wait_for_news(END_LOOK_SECONDS)
            now = context.clock.monotonic()
            deadline += self._beside.absence(now)
            self._beside.look(now)
            if self._growth is not None:
                self._growth.let_end(now - began)
            self._note_who_ended(now)
            if now - told > LATE_LINE_SECONDS:
                told = now
                report.say(
                    f"the training has ended well, and its program runs on: {now - began:.0f} s"
                )
            faulty |= self._lost_at_the_end()
            steps.release(set(), RELEASE_SECONDS if now > deadline else None)
            if faulty:
                # What is left of the program may wait for what was lost, and nothing joins it now.
                steps.end(at_once=True)
            elif (by_user := steps.ended_by_user()) is not None:
                steps.end(at_once=False)
            elif now > deadline:
                if now > deadline + GONE_SECONDS:
                    steps.end_stuck(living_seats(self._training_seen(), self._plan.lost_peers))
                steps.end_not_begun()
        self._note_who_ended(context.clock.monotonic())
        ended = context.clock.monotonic()
        while steps.awaits_words and context.clock.monotonic() - ended < REPORT_SECONDS:
            context.wait_for_news(END_LOOK_SECONDS)
        number, code = steps.failed_since()
        if not code and not faulty:
            faulty, code = self._look_for_untold(by_user)
        code = code or (1 if faulty else 0)
        if code:
            what = describe(code)
            report.say(f"the training had ended well; what came after it failed: {what}")
        return ev.StepsEnded(steps.codes(), (number, code), faulty)

    def _note_who_ended(self, now: float) -> None:
        """Take over what the training still shows: its last world may be seen later than its
        outcome."""
        self._plan.step(self._training_seen(), now)
        self._steps.note_lost(self._plan.seats_left_out(), self._plan.seats_lost_at_end())

    def _lost_at_the_end(self) -> dict[str, str]:
        """Return the nodes that have died with tasks that still ran, and the reasons."""
        dead = {
            name: verdict.reason
            for name, verdict in self._context.link.faulty().items()
            if verdict.verdict == "dead"
        }
        given_up = list(self._steps.failed_nodes())
        lost = {}
        for slot in self._plan.seat_map.slots:
            seats, reason = set(slot.seats), dead.get(slot.node, "")
            # Where a step has lost a node of this name long ago, this one is a new machine.
            if not reason and any(name == slot.node and seats & held for name, held in given_up):
                reason = "Slurm gave it up"
            if reason and self._steps.work_on(seats):
                lost[slot.node] = reason
            elif reason:
                self._steps.lose_seats(seats)
        return lost

    def _look_for_untold(self, by_user: int | None) -> tuple[dict[str, str], int]:
        """Look for an end of tasks of which nothing else tells.

        Args:
            by_user: the number of a step that the user ended; None: there is none.

        Returns:
            The nodes that Slurm gave up, so that their step was over for it; and the exit code: not
            0 where the user did not wait for them, where Slurm has ended the job, or cannot be
            asked.
        """
        slots, allocation = self._plan.seat_map.slots, self._context.allocation
        node_of_seat = {seat: slot.node for slot in slots for seat in slot.seats}
        seats, vouched = self._steps.seats_unheard_of(node_of_seat)
        silent = [slot.node for slot in slots if seats & set(slot.seats)]
        if not silent:
            names = [slot.node for slot in slots if vouched & set(slot.seats)]
            return (allocation.given_up(names), 0) if names else ({}, 0)
        try:
            over = allocation.refresh() not in ("RUNNING", "SUSPENDED")
        except SresError:
            over = True
        not_awaited = self._steps.step(by_user).code if by_user is not None else 0
        return allocation.given_up(silent), not_awaited or int(over)

    def _finish(self, action: ev.EndAttempt) -> None:
        step = self._steps.step(action.step)
        self._end = StepEnd(
            step.code if action.code is None else action.code,
            step,
            action.stopped_by_us,
            action.faulty,
            0.0 if action.noticed is None else self._epoch(action.noticed),
            self._word(action),
            action.late_code,
        )

    def _word(self, action: ev.EndAttempt) -> EndWord:
        if action.reported_by_training:
            return EndWord.TRAINING
        return self._steps.word_at_end()

    def _stop_searches(self) -> None:
        for search in self._searches.values():
            search.stop()
        self._searches.clear()

    def _report_joined(self, loss: LostSeats, nodes: tuple[str, ...], training_step: int) -> None:
        self._context.events.write("joined", nodes=[loss.node], seats=list(loss.seats))
        seats = _listed(loss.seats)
        if loss.cause.blames_node:
            done = f"{loss.slot.node} exchanged for {loss.node}, which joined as seats {seats}"
        else:
            done = f"seats {seats} were started again on {loss.node}; no node is at fault"
        now = self._context.clock.monotonic()
        report.healed(
            report.HealedBlock(
                what=f"{loss.slot.node}: {loss.reason}",
                done=f"{done}; now on {fold(nodes)}",
                seats=loss.seats,
                went_on=None if loss.went_on is None else loss.went_on - loss.noticed,
                nodes_ready=(loss.nodes_ready or loss.noticed) - loss.noticed,
                started=(loss.started or loss.noticed) - loss.noticed,
                joined=now - loss.noticed,
                step=training_step,
                step_before=loss.before.step,
            )
        )

    def _epoch(self, monotonic: float) -> float:
        clock = self._context.clock
        return clock.now() - (clock.monotonic() - monotonic)


def _listed(seats: tuple[int, ...]) -> str:
    return ",".join(map(str, seats))
