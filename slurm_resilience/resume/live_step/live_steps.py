"""The running steps of a living attempt: the first one, and those that joined it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.transitions import advance
from slurm_resilience.resume.live_step.seats import StepSeats
from slurm_resilience.resume.srun.close_sockets import close_sockets, connections
from slurm_resilience.resume.srun.stderr_reader import EndedTasks
from slurm_resilience.resume.srun.step import SrunStep, end_step

RELEASE_SECONDS = 10.0
"""Between two questions whether a step is over whose srun has not noticed."""
RELEASE_AT_END_SECONDS = 1.0
"""The same, when no process of the training lives any more."""
LAST_WORDS_SECONDS = 0.1
"""For what an srun still prints when its tasks are gone."""
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


@dataclass(eq=False)
class LiveSrun:
    """One step of the attempt."""

    step: SrunStep
    number: int
    tasks_read: int = 0
    """Ended tasks that were read already."""
    was_connected: bool = False
    """srun had connections to its tasks when it lost the node."""
    state: StepState = StepState.RUNNING

    def enter(self, state: StepState) -> None:
        """Change the state.

        Raises:
            IllegalTransition: `STEP_TRANSITIONS` does not have the change.
        """
        self.state = advance(STEP_TRANSITIONS, self.state, state)

    def lose_node(self) -> None:
        """Note that a node of it is gone."""
        if self.state is StepState.RUNNING:
            self.enter(StepState.NODE_LOST)
        self.was_connected |= connections(self.step.pid) > 0

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
    def cancelled(self) -> bool:
        """Return whether Slurm ended the step, for no lost node and not for us.

        An srun that has lost a node may wait for it for minutes then.
        """
        told = self.step.told_end
        is_over = not self.step.running or self.state is StepState.NODE_LOST
        return is_over and (told.cancelled or told.aborted)


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
    reported_by_training: bool = False
    """The training itself said how it ended."""


class LiveSteps:
    """All of an attempt's steps, in the order in which they were started."""

    def __init__(self, context: SupervisorContext, step: SrunStep, seats: StepSeats) -> None:
        """
        Args:
            context: of the supervised srun.
            step: the first one.
            seats: of each step, by its number.
        """
        self._context = context
        self._seats = seats
        self._sruns = {0: LiveSrun(step, 0)}
        self._asked = float("-inf")

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

    def start(self, number: int, argv: Sequence[str], environment: dict[str, str]) -> None:
        """Start a join step.

        Raises:
            MissingTool: srun cannot be started.
        """
        context = self._context
        with context.user_signals.starting:
            wake = context.wake.set
            start = context.host_calls.start_srun
            step = start(argv, environment, wake, on_news=wake, clock=context.clock)
            context.user_signals.steps.append(step)
        self._sruns[number] = LiveSrun(step, number)

    def failed_nodes(self) -> Iterator[tuple[str, set[int]]]:
        """Yield nodes that Slurm gave up, with the seats that the step still has."""
        for srun in self:
            # A copy: the set grows in another thread.
            for node in tuple(srun.step.failed_nodes):
                yield node, self._seats.held_by(srun.number)

    def lose_node(self, numbers: Sequence[int], dead_address: str) -> None:
        """Note that some steps lost a node: their sruns may wait for it for minutes.

        Args:
            numbers: of the steps.
            dead_address: of the node, whose connections are closed at once: a new machine of its
                name may be there soon. Empty: the node still works.
        """
        for srun in self:
            if srun.number in numbers and srun.step.running:
                srun.lose_node()
                if dead_address:
                    close_sockets(srun.step.pid, dead_address)

    def died(self) -> Iterator[tuple[int, EndedTasks]]:
        """Yield the tasks that ended badly since the last call, with the number of their step."""
        for srun in self:
            ended = not srun.step.running
            fresh = srun.step.ended_tasks[srun.tasks_read :]
            srun.tasks_read += len(fresh)
            yield from ((srun.number, tasks) for tasks in fresh)
            if ended and srun.read_end() and srun.step.code and not srun.tasks_read:
                # srun could not even start them.
                tasks = tuple(range(len(self._seats.all_of(srun.number))))
                how = f"its srun ended with {srun.step.code}"
                yield srun.number, EndedTasks((), tasks, how)

    def ended_by_user(self) -> int | None:
        """Return the number of a step that the user ended; None: there is none."""
        for srun in self:
            step = srun.step
            if srun.state is StepState.RELEASED:
                continue
            if srun.cancelled:
                return srun.number
            if not step.running and (step.killed_by or self._context.user_ended(step, False)):
                return srun.number
        return None

    def release(self, living_seats: set[int]) -> None:
        """End each srun that has not noticed that its step is over, since it lost a node.

        Args:
            living_seats: seats with a living process.
        """
        silent = [
            srun for srun in self._waiting() if not living_seats & self._seats.held_by(srun.number)
        ]
        now = self._context.clock.monotonic()
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
            silent = srun.was_connected and connections(srun.step.pid) == 0
            if srun.step.pid in running and not silent:
                continue
            if not srun.step.wait(LAST_WORDS_SECONDS):
                srun.enter(StepState.RELEASED)
                srun.step.kill()
                srun.step.wait(KILL_SECONDS)

    def end_one(self, number: int) -> None:
        """End a join step that failed; the others go on."""
        srun = self._sruns.get(number)
        if srun is not None and srun.step.running:
            # A killed srun that a disk holds up runs on for a while.
            if srun.state is not StepState.RELEASED:
                srun.enter(StepState.RELEASED)
            self._end(srun, at_once=True)

    def let_end(self) -> None:
        """Wait for the end of all steps, as long as the grace; then end them.

        The training is over: its tasks end by themselves.
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
            at_once: without a grace.
        """
        for srun in reversed(list(self)):
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
