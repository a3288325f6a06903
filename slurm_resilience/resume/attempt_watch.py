"""Watch over one attempt, from the start of its first step to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.errors import IllegalTransition, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.companion import lost_with, waits_in_vain
from slurm_resilience.resume.allocation.companion_world import world_obstacle
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.crash_watch import CrashWatch, GatheringStage
from slurm_resilience.resume.decide.classify import Ending
from slurm_resilience.resume.evidence import gather_evidence, hear_cancels
from slurm_resilience.resume.fence import Fence
from slurm_resilience.resume.first_step import PlannedAttempt, start_companion_step
from slurm_resilience.resume.history import AttemptHistory
from slurm_resilience.resume.live_step import training
from slurm_resilience.resume.live_step.live_steps import StepEnd
from slurm_resilience.resume.progress.hang_watch import HangWatch
from slurm_resilience.resume.recovery import Recovery
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.step import KILL_SECONDS, SrunStep, end_step, find_step
from slurm_resilience.resume.srun.step_set import StepSet
from slurm_resilience.resume.step_layout import StepLayout
from slurm_resilience.wire.messages import AttemptStarted, NodeVerdict

if TYPE_CHECKING:
    from slurm_resilience.mesh.observer import Observer
    from slurm_resilience.resume.live_step.live_step import LiveStep
    from slurm_resilience.resume.live_step.seats import SeatMap
    from slurm_resilience.resume.progress.hang_evidence import FoundHang

FENCE_SECONDS = 10.0
"""Between two looks whether the fence stands: without it no checkpoint is written."""
ANNOUNCEMENT_SECONDS = 0.25
"""Between two looks whether a training has announced itself."""
START_LOOK_SECONDS = 0.1
"""Between two looks whether the tasks of a further attempt run; ever longer, up to a second."""
START_SECONDS = 5.0
"""A step that Slurm shows for this long runs, though srun's connections do not show it."""
UNTOLD_SECONDS = 60.0
"""The same where slurmstepd tells of its tasks' beginning, and does not: a prolog may run first."""
MOST_SHARE = 0.5
"""Tasks that have ended well, when the program is taken to come to its end."""
SEATS_SECONDS = 1.0
"""Between two looks at a training's seats, until all are seen: then its step is a living one."""


class AttemptWatch:
    """One attempt while it runs: where its tasks are, what goes wrong, and how it is ended."""

    def __init__(
        self,
        context: SupervisorContext,
        planned: PlannedAttempt,
        step: StepSet,
        *,
        fence: Fence,
        history: AttemptHistory,
        recovery: Recovery,
        training: training.TrainingWatch,
        hangs: HangWatch,
        block: report.RecoveryBlock | None = None,
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            planned: the attempt.
            step: its sruns: the first one has just been started.
            fence: of all attempts.
            history: of all attempts.
            recovery: the ways on.
            training: hears what the program tells of itself.
            hangs: looks at the steps that it reports.
            block: to be written into the log once tasks of the attempt run; None: it is the first.
        """
        self.nodes = planned.attempt.step_nodes
        """The step's: as they were planned, then as Slurm has them."""
        self._context = context
        self._allocation = context.allocation
        self._planned = planned
        self._attempt = planned.attempt
        self._step = step
        self._fence, self._history, self._recovery = fence, history, recovery
        self._training, self._hangs = training, hangs
        self._starting = block
        self._shown_since = 0.0
        """When Slurm was first seen to show the step, on the monotonic clock; 0: never."""
        self._layout = StepLayout(context, planned.attempt, step.main, planned.addresses)

    def until_end(self) -> tuple[Ending, float]:
        """Wait until the attempt ends, or must be ended.

        Returns:
            How it ended, and when that was noticed (seconds since the epoch).
        """
        progress_before = max(self._fence.progress(), self._history.last_step)
        with contextlib.ExitStack() as stack:
            end = self._until_end(stack)
        self._settle_layout()
        if self._starting is not None and end.code == 0 and not end.stopped_by_us:
            self._say_recovered(self._starting)  # it was over before a look at it
        self._starting = None
        self._context.events.write("step_ended", code=end.code)
        ending = gather_evidence(
            self._context,
            self._fence,
            end,
            self.nodes,
            progress_before,
            self._hangs.observed(),
            ended_well=not self._training.lives and self._ended_well() == 1.0,
        )
        # Slurm may have been asked for the cause for a while: that is part of the recovery.
        return ending, end.noticed or ending.ended_at

    def _until_end(self, stack: contextlib.ExitStack) -> StepEnd:
        context, step = self._context, self._step
        kept_nodes: frozenset[str] = frozenset()
        watched: tuple[Path, Observer] | None = None
        looked = context.clock.monotonic()

        def stage() -> GatheringStage:
            return training.stage_of(watched)

        crashes = CrashWatch(context, step, lives=self._step_lives, training=stage)
        while step.running:
            pause = self._layout.pause(self._hangs.pause(self._longest_pause(bool(watched))))
            news = context.clock.wait(context.wake, crashes.pause(pause))
            if self._layout_changed():
                news, kept_nodes = True, frozenset()
            hear_cancels(context, step.parts)
            early = self._end_early(stage)
            if early is not None:
                return early
            if crashes.look():
                self._end(at_once=True)
                break
            if context.clock.monotonic() - looked >= FENCE_SECONDS:
                looked = context.clock.monotonic()
                self._look_around()
            if self._step_lives:
                watched = self._follow_training(watched, stack)
            if not step.running or not (news or watched):
                continue
            context.wake.clear()
            bad = context.link.faulty()
            dead = any(verdict.verdict == "dead" for verdict in bad.values())
            # Where it can go from a sick node depends on its layout. A node that could not be left
            # may have died since.
            kept = self._layout.is_open or frozenset(bad) == kept_nodes
            if dead or (bad and not kept):
                may_leave = self._can_leave(bad)
                if not step.running:
                    break  # it ended while Slurm was asked, which may take minutes
                if may_leave:
                    return self._stop(bad)
                kept_nodes = frozenset(bad)
            if watched is not None and not bad:
                end = self._live(*watched)
                if end is not None:
                    return end
        if crashes.crash is not None:
            crash, noticed = crashes.crash, crashes.noticed
            return StepEnd(
                crash.code,
                step.speaker,
                stopped_by_us=True,
                noticed=noticed,
                parts=tuple(step.parts),
                crashed_on=crash.node,
            )
        told = self._training.told_end(step.main) if self._step_lives else None
        return told or StepEnd(step.code, step.speaker, parts=tuple(step.parts))

    def _longest_pause(self, watched: bool) -> float:
        """Return how long the caller may wait for news, and tell of a recovery that is complete."""
        if self._starting is not None:
            self._report_recovered()
            return max(START_LOOK_SECONDS, min(SEATS_SECONDS, self._step.ran_for / 10))
        if not self._step_lives:
            return FENCE_SECONDS
        return SEATS_SECONDS if watched else ANNOUNCEMENT_SECONDS

    def _follow_training(
        self, watched: tuple[Path, Observer] | None, stack: contextlib.ExitStack
    ) -> tuple[Path, Observer] | None:
        """Return where the training meets now, and its observer; None: nowhere yet."""
        if watched is not None:
            self._training.note_losses(self._step.main, watched)
            if not self._training.has_moved(watched[0]):
                return watched
        return self._training.connect(stack)

    @property
    def _step_lives(self) -> bool:
        """Return whether this attempt's step may outlive a node: not yet where it has several
        parts, of which each would have to be joined in an allocation of its own."""
        return self._training.lives and not self._planned.parts

    def _look_around(self) -> None:
        """Do what has time, from time to time."""
        self._fence.mend()
        ran_for = self._step.ran_for
        self._training.advise(ran_for)
        self._look_back(ran_for, self._hangs.observed().got_further)
        if not self._history.attempts[-1].next_way:
            with contextlib.suppress(SresError):
                way = self._recovery.next_way(
                    self.nodes, self._history.endings, lives=self._training.lives
                )
                self._history.goes_on_by(way)

    def _look_back(self, ran_for: float, further: bool) -> None:
        """Tell of nodes that were left for nothing but what ended there."""
        self._recovery.look_back(self._history.endings, self.nodes, ran_for, further)

    def _end_early(self, stage: Callable[[], GatheringStage]) -> StepEnd | None:
        """End an attempt whose tasks wait in vain; None: it goes on."""
        step = self._step
        for part in step.parts:
            if waits_in_vain(self._allocation, part):
                part.kill()
                part.wait(KILL_SECONDS)
        lost_part = step.lost_part()
        if lost_part is not None:
            return self._end_others(lost_part)

        def is_over() -> bool:
            # The others save what was computed, say. Where a few end early, by mistake, the others
            # wait for them in a collective.
            return stage() is GatheringStage.OVER or self._ended_well() >= MOST_SHARE

        hang = self._hangs.look(step, self.nodes, is_over)
        return self._stop_hung(hang) if hang is not None and step.running else None

    def _ended_well(self) -> float:
        """Return the share of the tasks that have ended well, as far as is known."""
        attempt = self._attempt
        well = sum(not end.failed for end in self._step.reports.ends())
        # Before Slurm has shown the step it is a plan.
        tasks = attempt.tasks_per_node * len(attempt.step_nodes) if attempt.step else 0
        return well / tasks if tasks else 0.0

    def _end_others(self, lost: SrunStep) -> StepEnd:
        """End the parts of an attempt that would wait for one that is gone."""
        noticed, step = self._context.clock.now(), self._step
        report.say(f"the part in job {lost.job} has ended with {lost.code}: ending the others")
        faulty = {} if lost is step.main else lost_with(self._allocation, lost)
        self._end(at_once=True)
        return StepEnd(
            lost.code or step.code,
            lost,
            # Its tasks may have ended well when Slurm told them to: the program has not.
            stopped_by_us=not lost.code,
            faulty=faulty,
            noticed=noticed,
            parts=tuple(step.parts),
        )

    def _stop(self, bad: Mapping[str, NodeVerdict]) -> StepEnd:
        """End a step that must leave nodes."""
        context, step = self._context, self._step
        noticed = context.clock.now()
        dead = next((v for v in bad.values() if v.verdict == "dead"), None)
        first = dead or next(iter(bad.values()))
        report.say(f"leaving node {first.node} ({first.reason}): ending the step")
        context.events.write("noticed", nodes=sorted(bad))
        gone = [name for name, verdict in bad.items() if verdict.verdict == "dead"]
        self._end(at_once=dead is not None, dead=gone)
        parts = tuple(step.parts)
        return StepEnd(step.code, step.main, stopped_by_us=True, noticed=noticed, parts=parts)

    def _stop_hung(self, hang: FoundHang) -> StepEnd:
        """End a step that reports no more steps."""
        noticed, step = self._context.clock.now(), self._step
        self._end(at_once=False)
        parts = tuple(step.parts)
        return StepEnd(
            step.code, step.main, stopped_by_us=True, noticed=noticed, parts=parts, hang=hang
        )

    def _end(self, *, at_once: bool, dead: Sequence[str] = ()) -> None:
        context = self._context
        for part in self._step.parts:
            if part.running:
                end_step(
                    part,
                    context.client,
                    part.job or self._allocation.id,
                    context.host,
                    grace=context.limits.grace,
                    at_once=at_once,
                    dead=dead,
                )

    # -- its nodes --------------------------------------------------------------------------------

    def _layout_changed(self) -> bool:
        """Return whether the layout became known, or is waited for no more."""
        was_open = self._layout.is_open
        return self._settle_layout() or was_open != self._layout.is_open

    def _settle_layout(self) -> bool:
        """Take over what is known of the step, in place of what was planned; return whether it is
        known since now."""
        step, parts = self._step, self._planned.parts
        attempt = self._layout.look()
        if parts and step.running and not step.is_complete:
            # The order of the first part's nodes comes when the last of them has begun.
            begun = attempt or self._layout.begun()
            if begun is not None:
                self._start_companions(begun)
        if attempt is None:
            return False
        if parts:
            attempt = self._with_companions(attempt)
        else:
            self._recovery.tasks_per_node = attempt.tasks_per_node
            self._allocation.companions.obstacle = self._companion_obstacle(attempt)
        moved = self.nodes != attempt.step_nodes
        self._attempt, self.nodes = attempt, attempt.step_nodes
        self._hangs.laid_out(attempt)
        self._recovery.step_size = len(attempt.step_nodes)
        self._allocation.own_steps.add(str(attempt.step))
        self._allocation.own_nodes = attempt.step_nodes
        self._context.events.write("laid_out", step=attempt.step, nodes=list(attempt.step_nodes))
        if moved:
            self._context.link.moved(AttemptStarted(attempt.number, attempt.step_nodes))
        return True

    def _start_companions(self, shown: Attempt) -> None:
        """Start the other parts of an attempt, now that its first one is in Slurm's books."""
        self._with_companions(shown)
        planned, step = self._planned, self._step
        for part in planned.parts[len(step.parts) :]:
            started = start_companion_step(self._context, planned, part, step.main)
            if started is None:
                return
            step.parts.append(started)

    def _with_companions(self, shown: Attempt) -> Attempt:
        """Take over what Slurm shows of an attempt's first part; return all of the attempt."""
        planned = self._planned
        others = (name for part in planned.parts[1:] for name in part.nodes)
        attempt = msgspec.structs.replace(
            shown,
            step_nodes=(*shown.step_nodes, *others),
            tasks_per_node=self._recovery.tasks_per_node,
        )
        self._planned = msgspec.structs.replace(planned, attempt=attempt)
        return attempt

    def _companion_obstacle(self, attempt: Attempt) -> str:
        """Return why this step cannot be spread over several allocations; empty: it can."""
        context, size = self._context, len(attempt.step_nodes)
        if context.standard_input.is_kept:
            return "two steps cannot share its standard input"
        if self._allocation.job.uid != self._context.host_calls.uid:
            return "the job is another user's"
        tasks = attempt.tasks_per_node * size
        return world_obstacle(context.command, context.environment, size, tasks)

    def _can_leave(self, bad: Mapping[str, NodeVerdict]) -> bool:
        return self._recovery.can_leave(bad, self._history.endings)

    # -- a step that lives on -----------------------------------------------------------------

    def _live(self, rendezvous: Path, observer: Observer) -> StepEnd | None:
        """Keep the step alive until its end; None: not all of its seats have been seen yet."""
        attempt, step = self._attempt, self._step
        seat_map = self._training.seat_map(step.main, attempt.step_nodes, (rendezvous, observer))
        if seat_map is None:
            return None

        def look() -> None:
            self._fence.mend()
            self._look_back(step.ran_for, self._hangs.observed().got_further)
            slots = live_step.seat_map.slots
            if not seat_map.needs_all:
                nodes = {seat: slot.node for slot in slots for seat in slot.seats}
                self._hangs.look_at_living(nodes)

        def find_hang(is_whole: bool) -> FoundHang | None:
            # A training finds its hangs by itself.
            if not seat_map.needs_all:
                return None
            return self._hangs.look_at_launched(
                step,
                live_step.nodes,
                lambda: self._ended_well() >= MOST_SHARE,
                is_whole=is_whole,
            )

        # Late: no step waits for what only a training needs.
        from slurm_resilience.resume.live_step.live_step import LiveStep

        live_step = LiveStep(
            self._context,
            observer,
            rendezvous,
            seat_map,
            attempt,
            step.main,
            can_leave=self._can_leave,
            mend_fence=look,
            find_hang=find_hang,
            addresses=self._allocation.addresses(),
        )
        return self._watch_living(live_step, seat_map)

    def _watch_living(self, live_step: LiveStep, seat_map: SeatMap) -> StepEnd:
        context = self._context
        context.events.write("living", nodes=list(seat_map.nodes), seats=seat_map.seats)
        context.wake.set()
        try:
            end = live_step.watch()
        except Exception as error:
            if isinstance(error, SresError) and not isinstance(error, IllegalTransition):
                raise
            # A bug of ours is no reason to end a training that goes on without us.
            self._context.host_calls.show_bug()
            report.say(f"the supervisor failed ({error!r}); the step goes on without its help")
            end = live_step.let_go()
        self.nodes = self._allocation.own_nodes = live_step.nodes
        for cause, seconds in live_step.stopped.items():
            self._history.stood_still(cause, seconds)
        return end

    def _report_recovered(self) -> None:
        """Report the recovery once tasks of the step run; not while it waits for its turn."""
        context, step = self._context, self._step
        if self._starting is None or not step.is_complete:
            return
        connected, nodes = True, 0
        for part in step.parts:
            job = part.job or self._allocation.id
            info = find_step(part, context.client, job, context.host)
            if info is None or not info.step.isdecimal():
                return
            nodes += len(info.nodes)
            # Each node connects to srun before it starts its tasks.
            connected &= self._context.host_calls.connections(part) >= len(info.nodes)
        now = context.clock.monotonic()
        self._shown_since = self._shown_since or now
        if step.ends_from_outside:
            return  # it may have been told to end while Slurm was asked
        shown_for, tells = now - self._shown_since, bool(step.reports.target)
        begun = len(step.reports.nodes()) >= nodes
        # A node connects to tell that its prolog failed, too.
        by_connections = connected and (not tells or shown_for >= START_SECONDS)
        if begun or by_connections or shown_for >= (UNTOLD_SECONDS if tells else START_SECONDS):
            self._say_recovered(self._starting)
            self._starting = None

    def _say_recovered(self, block: report.RecoveryBlock) -> None:
        self._context.events.write("running", attempt=block.attempt)
        times = {"step ended": block.step_ended, "nodes ready": block.nodes_ready}
        times["running"] = self._context.clock.now()
        self._history.came_back({n: max(0.0, at - block.noticed) for n, at in times.items()})
        report.block(
            msgspec.structs.replace(
                block,
                relaunched=self._context.clock.now(),
                lost=self._history.lost,
                from_step=self._fence.progress(),
            )
        )
