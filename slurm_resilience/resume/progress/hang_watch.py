"""Watch over the steps of one supervised srun: find a hang and its culprit, tell of slow nodes, and
how far an attempt got.

No step is ended that has never told `enough` steps, in this very attempt. Before one is, its nodes
are asked where its processes stand; where none answers, nothing is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.config import HangSettings
from slurm_resilience.errors import SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.classify import ObservedSteps
from slurm_resilience.resume.fence import Fence
from slurm_resilience.resume.first_step import PlannedAttempt, other_address
from slurm_resilience.resume.progress.furthest_step import FurthestStep
from slurm_resilience.resume.progress.hang_rule import ANY_RANK, Stall, StepRecord
from slurm_resilience.resume.progress.slow_nodes import SlowNodes
from slurm_resilience.resume.progress.step_listener import StepListener
from slurm_resilience.resume.progress.step_report import StepLine
from slurm_resilience.resume.progress.step_source import LOOK_SECONDS, StepSource
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.step_set import StepSet

if TYPE_CHECKING:
    from slurm_resilience.resume.progress.hang_evidence import (
        FoundHang,
        HangEvidence,
        NamedCulprit,
    )
    from slurm_resilience.resume.progress.stack_gathering import AskedNodes

LATE_SECONDS = 5.0
"""A node's answer is waited for so much longer than the helper step may take."""
BLIND_SECONDS = 30.0
"""A supervisor that looks so much later than it wanted to was stopped, with its tasks."""
POLL_SECONDS = 5.0
"""Between two looks for a checkpoint, and for slow nodes."""
MOST_LINES = 100_000
"""Lines that wait for a look; beyond it the oldest are forgotten."""
SHOWN_STACKS = 4


class AttemptSteps:
    """All that is learnt from the steps of one attempt."""

    def __init__(
        self, settings: HangSettings, earlier: Sequence[ObservedSteps], now: float
    ) -> None:
        """
        Args:
            settings: what is a hang.
            earlier: the steps of the attempts before, oldest first.
            now: when the attempt begins, on the monotonic clock.
        """
        self.record = StepRecord(settings.floor, settings.steps)
        self.slow = SlowNodes()
        self.furthest = FurthestStep(earlier, now)

    def hear(self, line: StepLine, at: float) -> bool:
        """Take in a line; tell whether it is progress."""
        self.slow.hear(line)
        self.furthest.hear(line, at)
        return self.record.hear(line, at)


class HangStage(Enum):
    """The stages of one stall."""

    WATCHING = "watching"
    GATHERING = "gathering"
    """A thread asks the nodes where the processes stand."""
    TOLD = "told"
    """The log has the block; the step runs on."""


class HangWatch:
    """Looks at the steps that the tasks of the present attempt report."""

    def __init__(
        self,
        context: SupervisorContext,
        settings: HangSettings,
        source: StepSource | None,
        fence: Fence,
        listener: StepListener,
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            settings: what is a hang, and what follows.
            source: other steps than those that tasks report; None: there are none.
            fence: knows the checkpoints that the program reports, which are progress too.
            listener: hears what the tasks report.
        """
        self._listener = listener
        self._context = context
        self._settings = settings
        self._source = source
        self._fence = fence
        self._lines: deque[tuple[StepLine, float]] = deque(maxlen=MOST_LINES)
        """Lines that the receiving thread has left for the next look."""
        self._steps = AttemptSteps(settings, (), context.clock.monotonic())
        self._stage = HangStage.WATCHING
        self._attempt: Attempt | None = None
        self._gathered: list[HangEvidence] = []
        """All that the thread has gathered, once it is done."""
        self._gathering_until = 0.0
        self._looked = self._polled = context.clock.monotonic()
        self._checkpoint = -1
        self._furthest = -1
        """The furthest step that any attempt of this process has told."""

    def begin(
        self, planned: PlannedAttempt, earlier: Sequence[ObservedSteps] = ()
    ) -> PlannedAttempt:
        """Watch over another attempt: what was learnt of the one before is forgotten.

        Args:
            planned: the attempt.
            earlier: the steps of those before, oldest first.

        Returns:
            The attempt, with the address to which its tasks report their steps.
        """
        # Tasks that outlived their srun have told more since the attempt was judged.
        self._furthest = max(self._furthest, self.observed().furthest)
        earlier = (ObservedSteps(self._furthest), *earlier)
        self._attempt = attempt = planned.attempt
        self._lines.clear()
        self._stage = HangStage.WATCHING
        self._looked = self._context.clock.monotonic()
        self._steps = AttemptSteps(self._settings, earlier, self._looked)
        self._checkpoint = self._fence.progress()
        if self._settings.act == "off":
            return planned
        facing = other_address(self._context, attempt, planned.addresses)
        steps_to = self._listener.expect(facing, self._take)
        return msgspec.structs.replace(planned, steps_to=steps_to)

    def laid_out(self, attempt: Attempt) -> None:
        """Take over what Slurm shows of the attempt's step: how many tasks each node has."""
        self._attempt = attempt

    def _take(self, line: StepLine) -> None:
        """Leave a line for the next look; the receiving thread calls it."""
        self._lines.append((line, self._context.clock.monotonic()))

    @property
    def best_step(self) -> int:
        """Return the furthest step of any rank in this attempt; -1: none was told."""
        return max(self._steps.record.steps.values(), default=-1)

    def observed(self) -> ObservedSteps:
        """Return how far this attempt got, by all that its tasks have told until now."""
        if self._settings.act != "off":
            self._take_in(self._context.clock.monotonic())
        return self._steps.furthest.told()

    def pause(self, longest: float) -> float:
        """Return how long the caller may wait for news."""
        if self._settings.act == "off":
            return longest
        now = self._context.clock.monotonic()
        due = self._steps.record.due(now)
        if self._stage is HangStage.GATHERING:
            return min(longest, LOOK_SECONDS)
        if self._source is not None:
            longest = min(longest, LOOK_SECONDS)
        if due is None or self._stage is HangStage.TOLD:
            return longest
        # New lines put the end of the wait off; a look costs nothing.
        return min(longest, max(LOOK_SECONDS, due))

    def look(
        self, step: StepSet, nodes: tuple[str, ...], is_over: Callable[[], bool]
    ) -> FoundHang | None:
        """Look at what came since; return the hang for which the step is to be ended.

        Args:
            step: the attempt's sruns.
            nodes: of its step, by node id.
            is_over: tells whether the work is done: what tasks do after it has no steps.
        """
        if self._settings.act == "off":
            return None
        now = self._context.clock.monotonic()
        moved = self._take_in(now)
        if now - self._polled >= POLL_SECONDS:
            self._polled = now
            moved |= self._has_checkpoint(now)
            self._tell_slow_nodes(nodes)
        stall = self._steps.record.stall(now)
        if moved or stall is None:
            self._went_on(moved)
            return None
        if is_over():
            self._steps.record.forgive(now)
            self._stage = HangStage.WATCHING
        elif self._stage is HangStage.WATCHING:
            self._begin_gathering(stall, step, nodes, now)
        elif self._stage is HangStage.GATHERING and self._has_gathered(now):
            return self._conclude(stall, now)
        return None

    def _was_blind(self, now: float) -> bool:
        """Tell whether this process stood still since its last look: it was stopped
        (`scontrol suspend`), or waited for a file system."""
        return now - self._looked > self.pause(BLIND_SECONDS) + BLIND_SECONDS

    def _take_in(self, now: float) -> bool:
        was_blind, self._looked = self._was_blind(now), now
        if was_blind:
            self._steps.record.forgive(now)
        moved = False
        while self._lines:
            line, at = self._lines.popleft()
            # No wait in which this process stood still counts, nor teaches how long one may be:
            # the tasks may have stood still with it, and a checkpoint is found late.
            moved |= self._steps.hear(line, now if was_blind else at)
        for line in self._source.look() if self._source is not None else ():
            moved |= self._steps.hear(line, now)
        return moved

    def _has_checkpoint(self, now: float) -> bool:
        """Return whether the program has reported another checkpoint: that is progress too."""
        checkpoint = self._fence.progress()
        if checkpoint == self._checkpoint:
            return False
        self._checkpoint = checkpoint
        return self._steps.record.hear(StepLine(ANY_RANK, checkpoint), now)

    def _went_on(self, moved: bool) -> None:
        if self._stage is HangStage.TOLD and moved:
            report.say(f"the program goes on: step {self.best_step} was reported")
        if moved:
            self._stage = HangStage.WATCHING

    # -- a hang -------------------------------------------------------------------------------

    def _begin_gathering(
        self, stall: Stall, step: StepSet, nodes: tuple[str, ...], now: float
    ) -> None:
        # Late, here and below: no step waits for what only a hang needs.
        from slurm_resilience.resume.progress.hang_evidence import HangEvidence
        from slurm_resilience.resume.progress.stack_gathering import make_directory

        context, attempt = self._context, self._attempt
        assert attempt is not None
        try:
            state = context.allocation.state_now()
        except SresError:
            state = ""
        if state != "RUNNING":
            # Suspended, or not known: no time in which Slurm lets nothing run is a hang.
            self._steps.record.forgive(now)
            return
        report.say(
            f"no step for {stall.seconds:.0f} s after step {stall.last_step} (limit "
            f"{stall.limit:.0f} s): asking the nodes where its processes stand"
        )
        asked = _asked_nodes(context, step, nodes)
        directory = make_directory(self._fence.directory, attempt.token, context.clock.now())
        placed = _nodes_of_ranks(nodes, attempt.tasks_per_node, stall.steps)
        gathered: list[HangEvidence] = []
        self._gathered = gathered
        self._stage = HangStage.GATHERING
        self._gathering_until = now + self._settings.gather + LATE_SECONDS
        token, seconds = attempt.token, self._settings.gather

        def gather() -> None:
            signs = context.host_calls.node_signs(
                context.launch.srun, context.environment, asked, token, directory, seconds
            )
            answered = {one.node for one in signs}
            silent = tuple(name for name in nodes if name not in answered)
            gathered.append(HangEvidence(stall, placed, signs, silent, directory))
            context.wake.set()

        context.host_calls.start_thread(gather, "stacks")

    def _has_gathered(self, now: float) -> bool:
        return bool(self._gathered) or now > self._gathering_until

    def _conclude(self, stall: Stall, now: float) -> FoundHang | None:
        from slurm_resilience.resume.progress.hang_evidence import (
            FoundHang,
            hang_in_words,
            is_debugged,
            name_culprit,
        )
        from slurm_resilience.resume.progress.stack_gathering import diagnose_dumps, keep

        evidence = self._gathered[0] if self._gathered else None
        if evidence is None or not evidence.signs:
            self._stage = HangStage.WATCHING
            self._steps.record.forgive(now)
            report.say("no node has told where its processes stand: nothing is done")
            return None
        evidence = msgspec.structs.replace(
            evidence, stall=msgspec.structs.replace(evidence.stall, seconds=stall.seconds)
        )
        keep(evidence)
        culprit = name_culprit(evidence, diagnose_dumps(evidence))
        debugged = is_debugged(evidence)
        ends = self._settings.act == "end" and not debugged
        self._tell(evidence, culprit, ends, debugged)
        self._context.events.write(
            "hang", ranks=list(culprit.ranks), nodes=list(culprit.nodes), ended=ends
        )
        self._stage = HangStage.TOLD
        if not ends:
            return None
        return FoundHang(hang_in_words(evidence.stall, culprit), culprit.node)

    def _tell(
        self, evidence: HangEvidence, culprit: NamedCulprit, ends: bool, debugged: bool
    ) -> None:
        from slurm_resilience.resume.progress.hang_evidence import culprit_in_words, stack_lines

        done = "the step is ended, and what follows is as after any fault that may pass"
        if not ends:
            why = "a debugger holds a process" if debugged else "--auto-resume-hangs=tell"
            done = f"nothing ({why}): the step runs on"
        report.hang(
            f"no step for {evidence.stall.seconds:.0f} s after step {evidence.stall.last_step}",
            culprit_in_words(culprit),
            stack_lines(evidence, culprit.ranks)[:SHOWN_STACKS],
            done,
            evidence.directory,
        )

    # -- slow nodes ---------------------------------------------------------------------------

    def look_at_launched(
        self, step: StepSet, nodes: tuple[str, ...], is_over: Callable[[], bool], *, is_whole: bool
    ) -> FoundHang | None:
        """Look at a plain program whose launchers go on without a node: it finds no hang by itself.

        Args:
            step: the attempt's first srun.
            nodes: of the launchers, in the order of their ranks.
            is_over: as `look` has it.
            is_whole: all launchers are there. Else the ranks wait, and then all begin anew.
        """
        if is_whole:
            return self.look(step, nodes, is_over)
        self._take_in(self._context.clock.monotonic())
        self._steps.record = StepRecord(self._settings.floor, self._settings.steps)
        self._stage = HangStage.WATCHING
        return None

    def look_at_living(self, nodes: Mapping[int, str]) -> None:
        """Look at a step that lives on: its ranks find a hang by themselves.

        Args:
            nodes: of each seat.
        """
        self._take_in(self._context.clock.monotonic())
        if self._settings.act != "off":
            self._say_slow_nodes(nodes)

    def _tell_slow_nodes(self, nodes: tuple[str, ...]) -> None:
        per_node = self._attempt.tasks_per_node if self._attempt is not None else 0
        self._say_slow_nodes(_nodes_of_ranks(nodes, per_node, self._steps.record.steps))

    def _say_slow_nodes(self, nodes: Mapping[int, str]) -> None:
        for text in self._steps.slow.news(nodes):
            report.say(text)


def _asked_nodes(
    context: SupervisorContext, step: StepSet, nodes: tuple[str, ...]
) -> list[AskedNodes]:
    """Return the nodes of each allocation that the attempt is spread over."""
    from slurm_resilience.resume.progress.stack_gathering import AskedNodes

    held = {one.id: tuple(one.nodes) for one in context.allocation.companions.held}
    parts = [part.job for part in step.parts if part.job in held]
    others = {name for job in parts for name in held[job]}
    own = tuple(name for name in nodes if name not in others)
    return [AskedNodes(context.allocation.id, own), *(AskedNodes(j, held[j]) for j in parts)]


def _nodes_of_ranks(
    nodes: tuple[str, ...], tasks_per_node: int, told: Collection[int] = ()
) -> dict[int, str]:
    """Return the node of each rank, where each node has as many; else nothing is known.

    Args:
        nodes: by node id.
        tasks_per_node: 0: not known, or not as many on each.
        told: ranks that were heard of: a launcher has several in one task.
    """
    total = max(len(nodes) * tasks_per_node, max(told, default=-1) + 1)
    if not nodes or not tasks_per_node or total % len(nodes):
        return {}
    return {rank: nodes[rank // (total // len(nodes))] for rank in range(total)}
