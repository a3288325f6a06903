"""The running steps of a living attempt: the first one, and those that joined it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.transitions import advance
from slurm_resilience.resume.live_step.seats import StepSeats, seats_of_tasks
from slurm_resilience.resume.srun.stderr_reader import EndedTasks, code_of, killed_from_outside
from slurm_resilience.resume.srun.step import SrunStep, ask_to_end, end_step, end_tasks_left
from slurm_resilience.resume.task_labels import TaskNumbers

if TYPE_CHECKING:
    from slurm_resilience.resume.progress.hang_evidence import FoundHang

RELEASE_SECONDS = 10.0
"""Between two questions whether a step is over whose srun has not noticed."""
RELEASE_AT_END_SECONDS = 1.0
"""The same, when no process of the training lives any more."""
LAST_WORDS_SECONDS = 0.1
"""For what an srun still prints when its tasks are gone."""
REPORT_SECONDS = 3.0
"""For what slurmstepd still tells of tasks whose srun was ended by us."""
KILL_SECONDS = 5.0
"""For an srun to end that was killed."""
END_LOOK_SECONDS = 0.2
"""Between two looks whether the steps have ended by themselves."""


class StepState(Enum):
    """The life of one step."""

    RUNNING = "running"
    NODE_LOST = "node_lost"
    """It has lost a node; its srun may wait for that node for minutes."""
    RELEASED = "released"
    """Slurm shows that the step is over, or its join failed: its srun was ended by us."""
    ENDED = "ended"
    """Its srun ended, and its end was read."""
    ENDED_WITHOUT_NODE = "ended_without_node"
    """The same, after the loss of a node."""


_S = StepState
STEP_TRANSITIONS: dict[StepState, frozenset[StepState]] = {
    _S.RUNNING: frozenset({_S.NODE_LOST, _S.RELEASED, _S.ENDED}),
    _S.NODE_LOST: frozenset({_S.RELEASED, _S.ENDED_WITHOUT_NODE}),
    _S.RELEASED: frozenset(),
    _S.ENDED: frozenset(),
    _S.ENDED_WITHOUT_NODE: frozenset(),
}


class LastPart(msgspec.Struct, frozen=True):
    """The part of an attempt that comes after its training has ended well."""

    left_out: frozenset[int]
    """Seats without which the others trained to the end: nothing counts that becomes of them."""
    lost_at_end: frozenset[int]
    """Seats that were known to be lost, and without which no world stepped: they were lost after
    the training."""
    read: dict[int, int]
    """Ended tasks of each step that were read before, by its number."""


class LiveSrun(msgspec.Struct, eq=False):
    """One step of the attempt."""

    step: SrunStep
    number: int
    tasks_read: int = 0
    """Ended tasks that were read already."""
    read_when_told: int | None = None
    """The same, when Slurm was first seen to have told of the step's end; None: it has not."""
    was_connected: bool = False
    """srun had connections to its tasks when it lost the node."""
    late_code: int | None = None
    """Exit code of what came after the training, when the step was ended for tasks that were stuck;
    None: it was not."""
    state: StepState = StepState.RUNNING

    def enter(self, state: StepState) -> None:
        """Change the state.

        Raises:
            IllegalTransition: `STEP_TRANSITIONS` does not have the change.
        """
        self.state = advance(STEP_TRANSITIONS, self.state, state)

    def lose_node(self, *, is_connected: bool) -> None:
        """Note that a node of it is gone."""
        if self.state is StepState.RUNNING:
            self.enter(StepState.NODE_LOST)
        self.was_connected |= is_connected

    def read_end(self) -> bool:
        """Note that srun has ended; True at the first time, and unless it was ended by us."""
        following = {
            StepState.RUNNING: StepState.ENDED,
            StepState.NODE_LOST: StepState.ENDED_WITHOUT_NODE,
        }.get(self.state)
        if following is None:
            return False
        self.enter(following)
        return True

    @property
    def lost_node(self) -> bool:
        """Return whether it has lost a node, or was ended for it: its code tells of that too."""
        return self.state not in (StepState.RUNNING, StepState.ENDED)

    @property
    def cancelled(self) -> bool:
        """Return whether Slurm ended the step, for no lost node and not for us.

        An srun that has lost a node may wait for it for minutes then, also before anything else
        knows of the loss: the step is over once its tasks end as they do when they are killed.
        Tasks that are only told to end have a GraceTime to do so.
        """
        if not self.note_told_end():
            return False
        ended = self.state is StepState.NODE_LOST and not self.step.only_signalled
        is_over = not self.step.running or ended
        return is_over or self.was_killed(self.read_when_told or 0)

    def note_told_end(self) -> bool:
        """Note which tasks ended before Slurm told that the step ends; return whether it did."""
        told = self.step.told_end
        if not (told.cancelled or told.aborted):
            self.read_when_told = None  # it was the word of an srun that a task ran
            return False
        if self.read_when_told is None:
            self.read_when_told = self.tasks_read
        return True

    def was_killed(self, since: int = 0) -> bool:
        """Return whether tasks were ended from outside, of those that ended from one on."""
        return killed_from_outside(self.step.ended_tasks[since:])


class EndWord(Enum):
    """The source of what is known of an attempt's end."""

    SRUN = "srun"
    """Its srun, and its tasks' own ends."""
    TRAINING = "training"
    """The training itself said how it ended."""
    PERSON = "person"
    """A person cancelled a step of a living attempt, whatever became of tasks long before."""
    SIGNALLED = "signalled"
    """Tasks of such a step were told to end, by Slurm or by a person, and Slurm has ended none."""


class StepEnd(msgspec.Struct, frozen=True):
    """The end of the attempt."""

    code: int
    """As a shell shows it."""
    step: SrunStep
    """The one whose end it was."""
    stopped_by_us: bool = False
    faulty: dict[str, str] = {}
    """Nodes that were lost and not replaced, with the reason."""
    noticed: float = 0.0
    """Seconds since the epoch: when the trouble began; 0: none was noticed."""
    word: EndWord = EndWord.SRUN
    late_code: int = 0
    """The exit code of what failed after the training had ended well; 0: nothing did."""
    hang: FoundHang | None = None
    """It hung, and was ended for that; None: it did not."""
    parts: tuple[SrunStep, ...] = ()
    """All sruns of an attempt that is spread over several allocations: a person may have cancelled
    any of them; empty: there is no other one."""
    crashed_on: str = ""
    """The node of the task for whose crash the others were ended; empty: not known, or they were
    not ended for one."""
    taken: tuple[str, ...] = ()
    """Nodes that a person took out of the job while the others went on."""


class LiveSteps:
    """All of an attempt's steps, in the order in which they were started."""

    def __init__(
        self, context: SupervisorContext, step: SrunStep, seats: StepSeats, per_task: int = 1
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            step: the first one.
            seats: of each step, by its number.
            per_task: seats that one task fills.
        """
        self._per_task = per_task
        self._context = context
        self._seats = seats
        self._sruns = {0: LiveSrun(step, 0)}
        self._asked = self._asked_begun = float("-inf")
        self._last_part = LastPart(frozenset(), frozenset(), {})
        self.word = EndWord.SRUN
        """A person's, once one of them was cancelled."""

    def __iter__(self) -> Iterator[LiveSrun]:
        return iter(self._sruns.values())

    @property
    def running(self) -> bool:
        return any(srun.step.running for srun in self)

    def step(self, number: int) -> SrunStep:
        """Return the srun of a step."""
        return self._sruns[number].step

    def codes(self) -> dict[int, int]:
        """Return the exit codes, by the number of the step."""
        return {srun.number: srun.step.code for srun in self}

    def start(
        self,
        number: int,
        argv: Sequence[str],
        environment: dict[str, str],
        numbers: TaskNumbers | None = None,
    ) -> None:
        """Start a join step.

        Args:
            number: of the step.
            argv: its srun.
            environment: of srun.
            numbers: of its tasks among all, where srun labels their lines.

        Raises:
            MissingTool: srun cannot be started.
        """
        context = self._context
        with context.user_signals.starting:
            step = context.start_join(argv, environment, numbers)
            context.user_signals.steps.append(step)
        self._sruns[number] = LiveSrun(step, number)

    def adopt(self, number: int, step: SrunStep) -> None:
        """Take a join step in that runs already."""
        signals = self._context.user_signals
        with signals.starting:
            signals.steps.append(step)
        self._sruns[number] = LiveSrun(step, number)

    def failed_nodes(self) -> Iterator[tuple[str, set[int]]]:
        """Yield nodes that Slurm gave up, with the seats that the step still has."""
        for srun in self:
            for node in srun.step.failed_nodes:
                yield node, self._seats.held_by(srun.number)

    def lose_node(self, numbers: Sequence[int], dead_address: str) -> None:
        """Note that some steps lost a node: their sruns may wait for it for minutes.

        Args:
            numbers: of the steps.
            dead_address: of the node, whose connections are closed at once: a new machine of its
                name may be there soon. Empty: the node still works.
        """
        host_calls = self._context.host_calls
        for srun in self:
            if srun.number in numbers and srun.step.running:
                srun.lose_node(is_connected=host_calls.connections(srun.step) > 0)
                if dead_address:
                    host_calls.close_connections(srun.step, dead_address)

    def died(self) -> Iterator[tuple[int, EndedTasks, bool]]:
        """Yield the tasks that ended badly since the last call, with the number of their step, and
        whether srun could not even start them on their node."""
        for srun in self:
            ended = not srun.step.running
            srun.note_told_end()
            fresh = srun.step.ended_tasks[srun.tasks_read :]
            srun.tasks_read += len(fresh)
            yield from ((srun.number, tasks, False) for tasks in fresh)
            if ended and srun.read_end() and srun.step.code and not srun.tasks_read:
                # srun could not even start them.
                tasks = tuple(range(len(self._seats.all_of(srun.number))))
                why = ", ".join(sorted(set(srun.step.failed_launches.values())))
                how = f"its srun ended with {srun.step.code}"
                how = f"srun could start no task on it: {why}" if why else how
                yield srun.number, EndedTasks((), tasks, how), bool(why)

    def ended_by_user(self) -> int | None:
        """Return the number of a step that the user ended; None: there is none."""
        for srun in self:
            step = srun.step
            if srun.state is StepState.RELEASED:
                continue
            if srun.cancelled:
                self._note_word(srun)
                return srun.number
            is_over = not step.running or srun.was_killed()
            if is_over and (step.killed_by or self._context.user_ended(step, False)):
                return srun.number
        return None

    @property
    def may_be_ending(self) -> bool:
        """Tell whether Slurm may be ending a step: where no living task of it is left that could be
        killed, its srun waits for a node that died unseen, and ends after KillWait."""
        return any(srun.step.may_be_ending for srun in self)

    def word_at_end(self) -> EndWord:
        """Return a person's word also where he cancelled a step as we had all of them ended."""
        for srun in self:
            # An srun that dies by itself meanwhile tells of no task any more.
            if srun.note_told_end() and (
                srun.step.killed_by or srun.was_killed(srun.read_when_told or 0)
            ):
                self._note_word(srun)
        return self.word

    def _note_word(self, srun: LiveSrun) -> None:
        """Take over what was told of a step's end: that Slurm has ended one weighs more."""
        if not srun.step.only_signalled:
            self.word = EndWord.PERSON
        elif self.word is not EndWord.PERSON:
            self.word = EndWord.SIGNALLED

    def release(self, living_seats: set[int], pause: float | None = None) -> None:
        """End each srun that has not noticed that its step is over, since it lost a node.

        Args:
            living_seats: seats with a living process.
            pause: seconds between two questions to Slurm; None: fewer where none lives.
        """
        silent = [
            srun for srun in self._waiting() if not living_seats & self._seats.held_by(srun.number)
        ]
        now = self._context.clock.monotonic()
        if pause is None:
            pause = RELEASE_SECONDS if living_seats else RELEASE_AT_END_SECONDS
        if silent and now - self._asked >= pause:
            self._asked = now
            self._release(silent)

    def _waiting(self) -> list[LiveSrun]:
        return [s for s in self if s.step.running and s.state is StepState.NODE_LOST]

    def _release(self, sruns: list[LiveSrun]) -> None:
        context = self._context
        try:
            running = {step.srun_pid for step in context.client.steps(context.allocation.id)}
        except SresError:
            return
        for srun in sruns:
            if not srun.step.running:
                continue
            # Slurm may wait for the lost node as well, if a new machine has its name.
            silent = srun.was_connected and context.host_calls.connections(srun.step) == 0
            if srun.step.pid in running and not silent:
                continue
            # A person who has cancelled it meanwhile is heard at the next look.
            if not srun.step.wait(LAST_WORDS_SECONDS) and not srun.note_told_end():
                srun.enter(StepState.RELEASED)
                srun.step.kill()
                srun.step.wait(KILL_SECONDS)
                # None of its processes lives but on the lost node, which may not write.
                srun.step.tasks_ended_at = srun.step.clock.monotonic()

    def end_one(self, number: int) -> None:
        """End a join step that failed; the others go on."""
        srun = self._sruns.get(number)
        if srun is not None and srun.step.running:
            # A killed srun that a disk holds up runs on for a while.
            if srun.state is not StepState.RELEASED:
                srun.enter(StepState.RELEASED)
            self._end(srun, at_once=True)

    def begin_last_part(self) -> None:
        """Note what has ended already: the training has ended well, and what its program does
        after it counts by itself."""
        read = {srun.number: srun.tasks_read for srun in self}
        self._last_part = LastPart(frozenset(), frozenset(), read)

    def note_lost(self, left_out: Set[int], lost_at_end: Set[int]) -> None:
        """Note which seats are lost (`LastPart`)."""
        part = self._last_part
        self._last_part = LastPart(frozenset(left_out), frozenset(lost_at_end), part.read)

    def failed_since(self) -> tuple[int, int]:
        """Return the step and the worst exit code of what failed in the last part; code 0: nothing
        did."""
        failed = [(self._failed_in_last_part(srun), srun.number) for srun in self]
        code, number = max(failed)
        return number, code

    def _counted_seats(self, srun: LiveSrun) -> set[int]:
        """Return the seats of a step that took part in the training to its end."""
        return self._seats.held_by(srun.number) - self._last_part.left_out

    def _failed_in_last_part(self, srun: LiveSrun) -> int:
        """Return the worst exit code; 0: nothing failed."""
        counted = self._counted_seats(srun)
        if srun.late_code is not None or not counted:
            return srun.late_code or 0
        codes = [code_of(ended.how) for ended in self._ended_in_last_part(srun)]
        # An srun that dies by itself takes what its tasks still do with it.
        died = bool(srun.step.killed_by and counted - self._seats_ended(srun))
        if srun.step.killed_by or srun.state is StepState.RELEASED:
            codes += self._untold_codes(srun, counted)
        return max(0, *codes, srun.step.code if died or self._tells_all(srun) else 0)

    def _untold_codes(self, srun: LiveSrun, counted: set[int]) -> list[int]:
        """Return the codes of tasks whose end slurmstepd has told of, and their srun has not: it
        was killed in that moment."""
        told = {task for ended in srun.step.ended_tasks for task in ended.tasks}
        ends = [end for end in srun.step.reports.ends() if end.task not in told]
        return [end.code for end in ends if counted & self._seats_of_tasks(srun, [end.task])]

    def _ended_in_last_part(self, srun: LiveSrun) -> list[EndedTasks]:
        """Return the tasks that ended badly after the training."""
        part, counted = self._last_part, self._counted_seats(srun)
        chosen = []
        for index, ended in enumerate(tuple(srun.step.ended_tasks)):
            seats = counted & self._seats_of_tasks(srun, ended.tasks)
            if index < part.read.get(srun.number, 0):
                # The plan took it for a loss in the training, before it knew of the training's end.
                seats &= part.lost_at_end
            if seats:
                chosen.append(ended)
        return chosen

    def _tells_all(self, srun: LiveSrun) -> bool:
        """Return whether an srun's own code is that of the last part: all that it lost counts."""
        all_count = len(self._ended_in_last_part(srun)) == len(srun.step.ended_tasks)
        return all_count and not srun.lost_node

    def end_stuck(self, stuck_seats: Set[int]) -> None:
        """End each srun that waits for nothing but processes which never left the training.

        Args:
            stuck_seats: theirs.
        """
        for srun in self:
            if not srun.step.running:
                continue
            held = self._seats.held_by(srun.number)
            if held & stuck_seats and not held - stuck_seats - self._seats_ended(srun):
                srun.late_code = self._failed_in_last_part(srun)
                self._end(srun, at_once=False)

    def end_not_begun(self) -> None:
        """End each join step that the training did not wait for, and that has no task yet: it may
        wait for its node for ever."""
        context = self._context
        waiting = [
            srun
            for srun in self
            if srun.number
            and srun.step.running
            and srun.step.reports.step is None
            and not self._counted_seats(srun)
        ]
        now = context.clock.monotonic()
        if not waiting or now - self._asked_begun < RELEASE_SECONDS:
            return
        self._asked_begun = now
        try:
            shown = context.client.steps(context.allocation.id)
        except SresError:
            return
        begun = {info.srun_pid for info in shown if info.step.isdecimal()}
        for srun in waiting:
            if srun.step.pid not in begun:
                self.end_one(srun.number)

    def work_on(self, seats: Collection[int]) -> bool:
        """Return whether an srun still has a task of these seats, as far as is known, that took
        part in the training to its end."""
        return any(
            srun.step.running
            and srun.state is not StepState.RELEASED
            and set(seats) & self._counted_seats(srun) - self._seats_ended(srun)
            for srun in self
        )

    def seats_unheard_of(self, node_of_seat: Mapping[int, str]) -> tuple[set[int], set[int]]:
        """Return the seats of which no end is known, though their srun has ended, or was released
        since Slurm said that the step is over.

        Args:
            node_of_seat: the node of each seat, as it is now.

        Returns:
            Those that may have failed; and those that have ended well by the word of their srun: it
            has waited for them, and tells of the others. But no srun is told of a node that
            sresctld takes out of the job.
        """
        unheard, vouched = set[int](), set[int]()
        for srun in self:
            if srun.step.code and not self._tells_all(srun):
                silent = self._counted_seats(srun) - self._seats_ended(srun)
                if srun.step.heard_all:
                    given_up = srun.step.failed_nodes
                    well = {seat for seat in silent if node_of_seat.get(seat) not in given_up}
                    vouched |= well
                    silent -= well
                unheard |= silent
        return unheard, vouched

    @property
    def awaits_words(self) -> bool:
        """Tell whether the end of a task has still to be told whose srun was released: its step was
        over for Slurm, and slurmstepd tells of each task by itself."""
        return any(
            srun.state is StepState.RELEASED
            and bool(self._counted_seats(srun) - self._seats_ended(srun))
            for srun in self
        )

    def lose_seats(self, seats: Collection[int]) -> None:
        """Note that the node of these seats is gone, in the last part, which goes on without it."""
        numbers = [
            srun.number
            for srun in self
            if srun.state is StepState.RUNNING and set(seats) & self._seats.held_by(srun.number)
        ]
        self.lose_node(numbers, "")

    def _seats_ended(self, srun: LiveSrun) -> set[int]:
        """Return the seats of tasks that have ended, well or not, as far as slurmstepd told."""
        return self._seats_of_tasks(srun, [end.task for end in srun.step.reports.ends()])

    def _seats_of_tasks(self, srun: LiveSrun, tasks: Sequence[int]) -> set[int]:
        return {*seats_of_tasks(self._seats.all_of(srun.number), self._per_task, tasks)}

    def end_tasks_left(self, seats: Collection[int]) -> None:
        """Have no task of an earlier join step live beside the next one of its seats.

        Raises:
            SresError: Slurm did not take the order to end them.
        """
        for srun in self:
            if srun.step.may_leave_tasks and set(seats) & set(self._seats.all_of(srun.number)):
                context = self._context
                end_tasks_left(
                    srun.step,
                    context.client,
                    context.allocation.id,
                    context.host,
                    patience=0.0,
                    stop=context.allocation.user_stop,
                    say=report.say,
                )

    def let_end(self) -> None:
        """Wait for the end of all steps, as long as the grace; then end them.

        The training gave up: its tasks end by themselves.
        """
        clock = self._context.clock
        deadline = clock.monotonic() + self._context.limits.grace
        while self.running and (left := deadline - clock.monotonic()) > 0:
            self._context.wait_for_news(min(left, END_LOOK_SECONDS))
            self._release(self._waiting())
        self.end(at_once=False)

    def end(self, *, at_once: bool) -> None:
        """End all steps.

        Args:
            at_once: without a grace. With one, all are asked first: ranks that are asked together
                save what they have.
        """
        context = self._context
        deadline = context.clock.monotonic() + context.limits.grace
        running = [srun for srun in self if srun.step.running]
        if not at_once:
            for srun in running:
                if srun.number > 0:
                    ask_to_end(srun.step, context.client, context.allocation.id, context.host)
        # The first one has the grace; the join steps have what is left of it.
        for srun in reversed(running) if at_once else running:
            if srun.number > 0 and not at_once:
                srun.step.wait(max(0.0, deadline - context.clock.monotonic()))
            if srun.step.running:
                self._end(srun, at_once=at_once or srun.number > 0)

    def _end(self, srun: LiveSrun, *, at_once: bool) -> None:
        context = self._context
        end_step(
            srun.step,
            context.client,
            context.allocation.id,
            context.host,
            grace=context.limits.grace,
            at_once=at_once,
        )
