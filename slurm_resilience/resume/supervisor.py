"""Keep one srun of a job alive: the loop that `srun --auto-resume=1` becomes.

start srun → it ends, or a node of it turns bad → classify → plan → relaunch | swap | requeue | stop
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.clock import Clock, SteadyClock, SystemClock
from slurm_resilience.config import Config, HangSettings
from slurm_resilience.errors import IllegalTransition, SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.allocation.companion import end_earlier, lost_with, release_all
from slurm_resilience.resume.allocation.companion_world import world_obstacle
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.crash_watch import CrashWatch, GatheringStage
from slurm_resilience.resume.decide.budgets import spent
from slurm_resilience.resume.decide.classify import Cause, Ending, classify
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.size_target import SizeTarget
from slurm_resilience.resume.evidence import gather_evidence, hear_cancels
from slurm_resilience.resume.fence import Fence
from slurm_resilience.resume.first_step import (
    PlannedAttempt,
    plan_attempt,
    start_companion_step,
    start_first_step,
)
from slurm_resilience.resume.history import AttemptHistory
from slurm_resilience.resume.live_step import training
from slurm_resilience.resume.live_step.live_steps import StepEnd
from slurm_resilience.resume.progress.hang_watch import HangWatch
from slurm_resilience.resume.progress.step_source import StepSource
from slurm_resilience.resume.recovery import NextAttempt, Recovery
from slurm_resilience.resume.srun.command import AttemptCommand, step_nodes
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.standard_input import StandardInput, reads_input
from slurm_resilience.resume.srun.step import SrunStep, end_step, end_tasks_left, find_step
from slurm_resilience.resume.srun.step_set import StepSet
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.resume.step_layout import StepLayout
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.hostlists import expand, fold
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


class Supervisor:
    """One supervised srun."""

    def __init__(
        self,
        config: Config,
        client: SlurmClient,
        link: SupervisorLink,
        srun: str,
        command: SrunCommand,
        job: Job,
        *,
        has_plugin: bool,
        find_plugin: Callable[[], bool | None] | None = None,
        permits_expansion: bool,
        environment: Mapping[str, str],
        ports: Sequence[int] = (),
        clock: Clock | None = None,
        nodes: Sequence[Node] = (),
        host_calls: HostCalls | None = None,
        min_nodes: int = 0,
        size: ElasticSize | None = None,
        hangs: HangSettings | None = None,
        source: StepSource | None = None,
    ) -> None:
        """
        Args:
            config: all settings.
            client: asks Slurm.
            link: to sresctld.
            srun: path of the real srun.
            command: its arguments, without --auto-resume.
            job: the job that the step runs in.
            has_plugin: srun carries our SPANK plugin (it sets the tasks' variables).
            find_plugin: looks whether it still does, before each attempt but the first; None:
                srun does not tell.
            permits_expansion: Slurm may grow jobs without GRES.
            environment: the supervisor's own.
            ports: those that the site allows for srun; empty: any.
            clock: the time; None: the machine's.
            nodes: Slurm's, where they were just read.
            host_calls: to the machine that this runs on; None: the real one.
            min_nodes: the step may go on with so few nodes; 0: with no fewer than it began with.
            size: how it grows and shrinks while it runs; None: it does not.
            hangs: what is a hang, and what follows; None: as the site has it.
            source: of steps that the tasks do not report themselves; None: there is none.
        """
        # The machine's date may be set while an attempt runs, whose times are compared.
        clock = SteadyClock(clock or SystemClock())
        self._host_calls = host_calls = host_calls or HostCalls()
        step_size, self._step_nodes = step_nodes(command, job, environment)
        wake = link.news = threading.Event()
        user_stop = threading.Event()
        self._allocation = Allocation(
            client,
            job,
            user_stop,
            patience=config.resume.slurmctld_wait,
            permits_expansion=permits_expansion,
            clock=clock,
            nodes=nodes,
        )
        self._allocation.show_to(link.see)
        excluded = command.value("exclude")
        self._allocation.excluded = expand(excluded) if excluded and "/" not in excluded else ()
        self._context = SupervisorContext(
            clock=clock,
            limits=config.resume,
            client=client,
            allocation=self._allocation,
            link=link,
            launch=AttemptCommand(
                srun, has_plugin, step_size if min_nodes else 0, find_plugin or (lambda: has_plugin)
            ),
            command=command,
            environment=dict(environment),
            user_signals=UserSignals(wake, user_stop, clock),
            wake=wake,
            events=report.EventLog(environment.get("SRES_EVENTS", ""), clock),
            host=host_calls.name,
            host_calls=host_calls,
            standard_input=StandardInput(
                config.resume.stdin_limit_bytes,
                is_read=reads_input(command, environment.get("SLURM_STDINMODE", "")),
            ),
            reports=host_calls.reports(ports),
        )
        # Not $SLURM_RESTART_COUNT: a job that was submitted by another one may have that one's.
        restarts = job.restarts
        self._fence = Fence(client, job, restarts, host_calls)
        self._training = training.TrainingWatch(self._context, self._fence)
        self._hangs = HangWatch(
            self._context, hangs or config.hang, source, self._fence, host_calls.steps(ports)
        )
        self._recovery = Recovery(self._context, step_size, min_nodes)
        self._allocation.companions.supervisor = host_calls.pid
        self._allocation.companions.size = size
        self._allocation.companions.target = target = SizeTarget(size, wake.set)
        link.on_resize(target.take)
        self._planned: PlannedAttempt | None = None
        self._attempt: Attempt | None = None
        self._history = AttemptHistory(
            self._fence.history_folder, job.id, restarts, command.argv, host_calls.pid
        )
        target.keep = self._history.aims_at
        self._keeps_history = False
        """The job is requeued, and its next start goes on from here."""
        self._starting: report.RecoveryBlock | None = None
        """To be reported once tasks of the attempt run."""
        self._shown_since = 0.0
        """When Slurm was first seen to show its step, on the monotonic clock; 0: never."""
        self._layout: StepLayout | None = None

    def run(self, connect: Callable[[], None] = lambda: None) -> int:
        """Return srun's exit code (as a shell shows it), when the program has ended for good.

        Args:
            connect: connects the link, in a thread of its own; called once, when a first step has
                been started, or before that where a requeue is to be told of.
        """
        self._host_calls.receive_signals(self._context.user_signals.on_signal)
        self._fence.begin()
        if self._fence.restarts:
            connect()
            end_earlier(self._allocation)
        self._history.begin(self._context.clock)
        self._allocation.companions.target.restore(self._history.target)
        if self._fence.restarts:
            # Late: nothing is to be told of a job's first start.
            from slurm_resilience.resume import requeue_report

            # Slurm may have emptied the log that named the fault.
            job, now = self._allocation.job, self._context.clock.now()
            requeue_report.tell(self._context.link, job, self._history, now)
        number = self._history.next_number
        # Slurm has started the job again, whatever was left of the limits.
        budget = spent(self._history.endings, self._context.limits)
        if budget:
            report.say(f"not started again: {budget}")
            self._clean_up()
            return self._history.endings[-1].code or 1
        step: StepSet | None = None
        following: NextAttempt | None = None
        try:
            while True:
                if self._allocation.user_stop.is_set():
                    return self._code_without_step()
                started = self._start(number, again=step is not None)
                if started is None:
                    return self._code_without_step()
                is_first, step = step is None, started
                if is_first and not self._fence.restarts:
                    # What it loads, it loads while srun makes the step: the step would wait for it
                    # longer than sresctld hears of it earlier.
                    self._connect_beside_step(connect)
                if following is not None:
                    self._starting = following.block
                ending, noticed = self._watch(step)
                cause = classify(ending)
                self._look_back(ending.ran_for, ending.made_progress)
                began = self._history.attempts[-1].started
                lost = self._fence.lost_seconds(began, ending.ended_at)
                self._history.aims_at(self._allocation.companions.target.present)
                self._history.end(ending, cause.reason, self._fence.progress(), lost)
                following = self._next(cause, noticed, number)
                if following is None:
                    self._say_held(cause, step)
                    self._keeps_history = self._may_come_back(cause, step)
                    self._say_summary()
                    return self._last_code(step)
                self._end_tasks_left()
                self._step_nodes = following.nodes
                number += 1
        except SresError as error:
            if step is None:
                raise
            report.say(f"not resumed: {error}")
            # Slurm gave no answer, so that the job may be requeued by now.
            self._keeps_history = self._allocation.job.is_batch and self._allocation.job.requeue
            # A step that still runs dies with this process: it has no code of its own.
            return error.exit_code if step.running else self._last_code(step)
        except Exception as error:
            if step is None:
                raise
            return self._without_help(step, error)
        finally:
            self._clean_up()

    def _connect_beside_step(self, connect: Callable[[], None]) -> None:
        try:
            connect()
        except RuntimeError as error:  # no more threads: no reason to end a step
            report.say(f"sresctld cannot be asked ({error}): only Slurm tells of this step's nodes")

    def _without_help(self, step: StepSet, error: Exception) -> int:
        """Wait for the end of a step after a bug of ours, which is no reason to end it."""
        self._host_calls.show_bug()
        if step.running:
            report.say(f"the supervisor failed ({error!r}); the step goes on without its help")
        else:
            report.say(f"not resumed: the supervisor failed ({error!r})")
        while not step.wait(FENCE_SECONDS):
            self._fence.mend()
        return step.code

    # -- one attempt --------------------------------------------------------------------------

    def _start(self, number: int, *, again: bool) -> StepSet | None:
        """Start an attempt; None: the user ended this while it was prepared."""
        context, fence = self._context, self._fence
        if again:
            context.launch.look_again()
            fence.look_again()
        planned = plan_attempt(
            context,
            number,
            fence.restarts,
            self._step_nodes,
            fence.directory,
            self._recovery.tasks_per_node,
        )
        training.forget(fence.directory)
        self._attempt = attempt = fence.raise_for(planned.attempt)
        earlier = [ending.observed for ending in self._history.endings]
        planned = self._hangs.begin(msgspec.structs.replace(planned, attempt=attempt), earlier)
        self._planned = planned
        self._allocation.own_nodes = attempt.step_nodes
        nodes = list(attempt.step_nodes)
        if again:
            self._shown_since = 0.0
            report.say(f"starting attempt {number} on {fold(nodes)}")
            context.events.write("relaunched", attempt=number, nodes=nodes)
        context.wake.clear()
        # Before its tasks run: this host may die in the moment in which they begin.
        context.link.attempt(AttemptStarted(number, attempt.step_nodes))
        self._history.start(number, attempt.step_nodes, context.clock.now())
        step = start_first_step(context, planned, lives=self._step_lives, again=again)
        if step is None:
            return None
        self._layout = StepLayout(context, attempt, step, planned.addresses)
        context.events.write("started", attempt=number, nodes=nodes)
        return StepSet(step, max(1, len(planned.parts)))

    def _watch(self, step: StepSet) -> tuple[Ending, float]:
        """Wait until the attempt ends, or must be ended.

        Returns:
            How it ended, and when that was noticed (seconds since the epoch).
        """
        progress_before = max(self._fence.progress(), self._history.last_step)
        with contextlib.ExitStack() as stack:
            end = self._until_end(step, stack)
        self._settle_layout(step)
        if self._starting is not None and end.code == 0 and not end.stopped_by_us:
            self._say_recovered(self._starting)  # it was over before a look at it
        self._starting = None
        self._context.events.write("step_ended", code=end.code)
        ending = gather_evidence(
            self._context,
            self._fence,
            end,
            self._step_nodes,
            progress_before,
            self._hangs.observed(),
            ended_well=not self._training.lives and self._ended_well(step) == 1.0,
        )
        # Slurm may have been asked for the cause for a while: that is part of the recovery.
        return ending, end.noticed or ending.ended_at

    def _until_end(self, step: StepSet, stack: contextlib.ExitStack) -> StepEnd:
        context = self._context
        kept_nodes: frozenset[str] = frozenset()
        watched: tuple[Path, Observer] | None = None
        looked = context.clock.monotonic()

        def stage() -> GatheringStage:
            return training.stage_of(watched)

        crashes = CrashWatch(context, step, lives=self._step_lives, training=stage)
        while step.running:
            pause = self._layout_pause(self._hangs.pause(self._longest_pause(step, bool(watched))))
            news = context.clock.wait(context.wake, crashes.pause(pause))
            if self._layout_changed(step):
                news, kept_nodes = True, frozenset()
            hear_cancels(context, step.parts)
            early = self._end_early(step, stage)
            if early is not None:
                return early
            if crashes.look():
                self._end(step, at_once=True)
                break
            if context.clock.monotonic() - looked >= FENCE_SECONDS:
                looked = context.clock.monotonic()
                self._look_around(step)
            if self._step_lives:
                watched = self._follow_training(step, watched, stack)
            if not step.running or not (news or watched):
                continue
            context.wake.clear()
            bad = context.link.faulty()
            dead = any(verdict.verdict == "dead" for verdict in bad.values())
            # Where it can go from a sick node depends on its layout. A node that could not be left
            # may have died since.
            kept = self._layout_is_open() or frozenset(bad) == kept_nodes
            if dead or (bad and not kept):
                may_leave = self._can_leave(bad)
                if not step.running:
                    break  # it ended while Slurm was asked, which may take minutes
                if may_leave:
                    return self._stop(step, bad)
                kept_nodes = frozenset(bad)
            if watched is not None and not bad:
                end = self._live(step.main, *watched)
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

    def _longest_pause(self, step: StepSet, watched: bool) -> float:
        """Return how long the caller may wait for news, and tell of a recovery that is complete."""
        if self._starting is not None:
            self._report_recovered(step)
            return max(START_LOOK_SECONDS, min(SEATS_SECONDS, step.ran_for / 10))
        if not self._step_lives:
            return FENCE_SECONDS
        return SEATS_SECONDS if watched else ANNOUNCEMENT_SECONDS

    def _follow_training(
        self, step: StepSet, watched: tuple[Path, Observer] | None, stack: contextlib.ExitStack
    ) -> tuple[Path, Observer] | None:
        """Return where the training meets now, and its observer; None: nowhere yet."""
        if watched is not None:
            self._training.note_losses(step.main, watched)
            if not self._training.has_moved(watched[0]):
                return watched
        return self._training.connect(stack)

    @property
    def _step_lives(self) -> bool:
        """Return whether this attempt's step may outlive a node: not yet where it has several
        parts, of which each would have to be joined in an allocation of its own."""
        parts = self._planned.parts if self._planned is not None else ()
        return self._training.lives and not parts

    def _look_around(self, step: StepSet) -> None:
        """Do what has time, from time to time."""
        self._fence.mend()
        self._training.advise(step.ran_for)
        self._look_back(step.ran_for, self._hangs.observed().got_further)
        if not self._history.attempts[-1].next_way:
            with contextlib.suppress(SresError):
                way = self._recovery.next_way(
                    self._step_nodes, self._history.endings, lives=self._training.lives
                )
                self._history.goes_on_by(way)

    def _look_back(self, ran_for: float, further: bool) -> None:
        """Tell of nodes that were left for nothing but what ended there."""
        self._recovery.look_back(self._history.endings, self._step_nodes, ran_for, further)

    def _end_early(self, step: StepSet, stage: Callable[[], GatheringStage]) -> StepEnd | None:
        """End an attempt whose tasks wait in vain; None: it goes on."""
        lost_part = step.lost_part()
        if lost_part is not None:
            return self._end_others(step, lost_part)

        def is_over() -> bool:
            # The others save what was computed, say. Where a few end early, by mistake, the others
            # wait for them in a collective.
            return stage() is GatheringStage.OVER or self._ended_well(step) >= MOST_SHARE

        hang = self._hangs.look(step, self._step_nodes, is_over)
        return self._stop_hung(step, hang) if hang is not None and step.running else None

    def _ended_well(self, step: StepSet) -> float:
        """Return the share of the tasks that have ended well, as far as is known."""
        attempt = self._attempt
        assert attempt is not None
        well = sum(not end.failed for end in step.reports.ends())
        # Before Slurm has shown the step it is a plan.
        tasks = attempt.tasks_per_node * len(attempt.step_nodes) if attempt.step else 0
        return well / tasks if tasks else 0.0

    def _end_others(self, step: StepSet, lost: SrunStep) -> StepEnd:
        """End the parts of an attempt that would wait for one that is gone."""
        noticed = self._context.clock.now()
        report.say(f"the part in job {lost.job} has ended with {lost.code}: ending the others")
        faulty = {} if lost is step.main else lost_with(self._allocation, lost)
        self._end(step, at_once=True)
        return StepEnd(
            lost.code or step.code,
            lost,
            # Its tasks may have ended well when Slurm told them to: the program has not.
            stopped_by_us=not lost.code,
            faulty=faulty,
            noticed=noticed,
            parts=tuple(step.parts),
        )

    def _stop(self, step: StepSet, bad: Mapping[str, NodeVerdict]) -> StepEnd:
        """End a step that must leave nodes."""
        context = self._context
        noticed = context.clock.now()
        dead = next((v for v in bad.values() if v.verdict == "dead"), None)
        first = dead or next(iter(bad.values()))
        report.say(f"leaving node {first.node} ({first.reason}): ending the step")
        context.events.write("noticed", nodes=sorted(bad))
        gone = [name for name, verdict in bad.items() if verdict.verdict == "dead"]
        self._end(step, at_once=dead is not None, dead=gone)
        parts = tuple(step.parts)
        return StepEnd(step.code, step.main, stopped_by_us=True, noticed=noticed, parts=parts)

    def _stop_hung(self, step: StepSet, hang: FoundHang) -> StepEnd:
        """End a step that reports no more steps."""
        noticed = self._context.clock.now()
        self._end(step, at_once=False)
        parts = tuple(step.parts)
        return StepEnd(
            step.code, step.main, stopped_by_us=True, noticed=noticed, parts=parts, hang=hang
        )

    def _end(self, step: StepSet, *, at_once: bool, dead: Sequence[str] = ()) -> None:
        context = self._context
        for part in step.parts:
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

    def _end_tasks_left(self) -> None:
        """Have no task of the last attempt run beside the next one.

        Raises:
            SresError: Slurm did not take the order to end them.
        """
        context = self._context
        # A living attempt has several sruns.
        for step in context.user_signals.steps:
            if step.may_leave_tasks:
                end_tasks_left(
                    step,
                    context.client,
                    step.job or self._allocation.id,
                    context.host,
                    patience=context.limits.slurmctld_wait,
                    stop=self._allocation.user_stop,
                    say=report.say,
                )

    def _layout_pause(self, longest: float) -> float:
        return self._layout.pause(longest) if self._layout is not None else longest

    def _layout_is_open(self) -> bool:
        return self._layout is not None and self._layout.is_open

    def _layout_changed(self, step: StepSet) -> bool:
        """Return whether the layout became known, or is waited for no more."""
        was_open = self._layout_is_open()
        return self._settle_layout(step) or was_open != self._layout_is_open()

    def _settle_layout(self, step: StepSet) -> bool:
        """Take over what is known of the step, in place of what was planned; return whether it is
        known since now."""
        layout = self._layout
        attempt = layout.look() if layout is not None else None
        parts = self._planned.parts if self._planned is not None else ()
        if parts and layout is not None and step.running and not step.is_complete:
            # The order of the first part's nodes comes when the last of them has begun.
            begun = attempt or layout.begun()
            if begun is not None:
                self._start_companions(step, begun)
        if attempt is None:
            return False
        if parts:
            attempt = self._with_companions(attempt)
        else:
            self._recovery.tasks_per_node = attempt.tasks_per_node
            self._allocation.companions.obstacle = self._companion_obstacle(attempt)
        moved = self._step_nodes != attempt.step_nodes
        self._attempt, self._step_nodes = attempt, attempt.step_nodes
        self._hangs.laid_out(attempt)
        self._recovery.step_size = len(attempt.step_nodes)
        self._allocation.own_steps.add(str(attempt.step))
        self._allocation.own_nodes = attempt.step_nodes
        self._context.events.write("laid_out", step=attempt.step, nodes=list(attempt.step_nodes))
        if moved:
            self._context.link.moved(AttemptStarted(attempt.number, attempt.step_nodes))
        return True

    def _start_companions(self, step: StepSet, shown: Attempt) -> None:
        """Start the other parts of an attempt, now that its first one is in Slurm's books."""
        self._with_companions(shown)
        planned = self._planned
        assert planned is not None
        for part in planned.parts[len(step.parts) :]:
            started = start_companion_step(self._context, planned, part, step.main)
            if started is None:
                return
            step.parts.append(started)

    def _with_companions(self, shown: Attempt) -> Attempt:
        """Take over what Slurm shows of an attempt's first part; return all of the attempt."""
        planned = self._planned
        assert planned is not None
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
        if self._allocation.job.uid != self._host_calls.uid:
            return "the job is another user's"
        tasks = attempt.tasks_per_node * size
        return world_obstacle(context.command, context.environment, size, tasks)

    def _can_leave(self, bad: Mapping[str, NodeVerdict]) -> bool:
        return self._recovery.can_leave(bad, self._history.endings)

    # -- a step that lives on -----------------------------------------------------------------

    def _live(self, step: SrunStep, rendezvous: Path, observer: Observer) -> StepEnd | None:
        """Keep the step alive until its end; None: not all of its seats have been seen yet."""
        attempt = self._attempt
        assert attempt is not None
        seat_map = self._training.seat_map(step, attempt.step_nodes, (rendezvous, observer))
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
            parts = StepSet(step)
            return self._hangs.look_at_launched(
                parts,
                live_step.nodes,
                lambda: self._ended_well(parts) >= MOST_SHARE,
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
            step,
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
            self._host_calls.show_bug()
            report.say(f"the supervisor failed ({error!r}); the step goes on without its help")
            end = live_step.let_go()
        self._step_nodes = self._allocation.own_nodes = live_step.nodes
        for cause, seconds in live_step.stopped.items():
            self._history.stood_still(cause, seconds)
        return end

    # -- what comes next ----------------------------------------------------------------------

    def _next(self, cause: Cause, noticed: float, number: int) -> NextAttempt | None:
        """Prepare what follows attempt ``number``; None: the end."""
        return self._recovery.prepare(
            cause, self._history.endings, self._step_nodes, attempt=number, noticed=noticed
        )

    def _report_recovered(self, step: StepSet) -> None:
        """Report the recovery once tasks of the step run; not while it waits for its turn."""
        context = self._context
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
            connected &= self._host_calls.connections(part) >= len(info.nodes)
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

    # -- the end ------------------------------------------------------------------------------

    def _last_code(self, step: StepSet) -> int:
        last = self._history.last_ending
        if last is None:
            return step.code
        # srun itself died of a signal: a shell should see the same of us.
        if step.killed_by and last.code == step.code and not last.stopped_by_us:
            self._end_by(step.killed_by)
        return last.code

    def _code_without_step(self) -> int:
        """Return the code when the user ended this while no step was running."""
        last = self._history.last_ending
        if last is not None:
            self._keeps_history = self._recovery.is_taken_back()
            return last.code
        number = self._context.user_signals.ending()
        self._end_by(number)
        return 128 + number

    def _say_held(self, cause: Cause, step: StepSet) -> None:
        """Tell how a job starts again that Slurm requeues for a prolog: it holds that job."""
        job, nodes = self._allocation.job, step.prolog_nodes
        if cause.kind != "job_over" or not nodes:
            return
        text = f"the job's prolog failed on {fold(nodes)}, so Slurm drains it and ends the job"
        if job.is_batch and job.requeue:
            text += (
                f"; it requeues and holds it: `scontrol release {job.id}` has it start again (not "
                "needed where SchedulerParameters has nohold_on_prolog_fail)"
            )
        report.say(text)

    def _say_summary(self) -> None:
        goodput = None if self._keeps_history else self._history.goodput()
        if goodput is not None:
            report.summary(goodput, len(self._history.attempts), self._fence.restarts)

    def _may_come_back(self, cause: Cause, step: StepSet) -> bool:
        if cause.kind in ("node", "program"):
            return self._recovery.is_taken_back()
        job = self._allocation.job
        by_slurm = cause.kind == "job_over" and job.is_batch and job.requeue
        # Slurm words a requeue as it does a cancellation. Without a fault nothing is lost. Of a
        # node, srun may tell before sresctld does.
        return by_slurm and (self._history.had_faults or bool(step.failed_nodes))

    def _clean_up(self) -> None:
        release_all(self._allocation)
        self._context.link.close()
        if not self._keeps_history:
            self._history.remove()
        self._fence.remove()

    def _end_by(self, number: int) -> None:
        self._clean_up()
        self._host_calls.end_by(number)
