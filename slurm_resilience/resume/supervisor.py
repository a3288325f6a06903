"""Keep one srun of a job alive: the loop that `srun --auto-resume=1` becomes.

start srun → it ends, or a node of it turns bad → classify → plan → relaunch | swap | requeue | stop
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.clock import Clock, SteadyClock, SystemClock
from slurm_resilience.config import Config, HangSettings
from slurm_resilience.errors import SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.budgets import spent
from slurm_resilience.resume.decide.classify import Cause, classify
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.size_target import SizeTarget
from slurm_resilience.resume.fence import Fence, forget_attempt
from slurm_resilience.resume.first_step import PlannedAttempt, plan_attempt, start_first_step
from slurm_resilience.resume.history import AttemptHistory
from slurm_resilience.resume.live_step.living_program import can_live
from slurm_resilience.resume.progress.hang_watch import HangWatch
from slurm_resilience.resume.progress.step_source import StepSource
from slurm_resilience.resume.srun.command import AttemptCommand, step_nodes
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.standard_input import StandardInput, reads_input
from slurm_resilience.resume.srun.step import end_tasks_left
from slurm_resilience.resume.srun.step_set import StepSet
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.hostlists import expand, fold
from slurm_resilience.wire.messages import AttemptStarted

if TYPE_CHECKING:
    from slurm_resilience.resume.attempt_watch import AttemptWatch
    from slurm_resilience.resume.live_step.training import TrainingWatch
    from slurm_resilience.resume.recovery import NextAttempt, Recovery

STEP_FIRST_SECONDS = 0.01
"""For srun and Slurm to make a first step. What watches it is loaded then: on a small machine the
step would wait for the processors."""
LOOK_SECONDS = 10.0
"""Between two looks whether the fence stands, at a step that goes on without help."""


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
        preempts: bool = True,
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
            preempts: Slurm may preempt jobs.
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
            preempts=preempts,
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
        self._lives = bool(self._fence.directory) and can_live(command, environment)
        """Steps are started so that they outlive a node."""
        self._hangs = HangWatch(
            self._context, hangs or config.hang, source, self._fence, host_calls.steps(ports)
        )
        self._step_size, self._min_nodes = step_size, min_nodes
        self._allocation.companions.supervisor = host_calls.pid
        self._allocation.companions.size = size
        self._allocation.companions.target = target = SizeTarget(size, wake.set)
        link.on_resize(target.take)
        self._history = AttemptHistory(
            self._fence.history_folder, job.id, restarts, command.argv, host_calls.pid
        )
        target.keep = self._history.aims_at
        self._allocation.claims.share(self._history, host_calls)
        self._keeps_history = False
        """The job is requeued, and its next start goes on from here."""

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
            from slurm_resilience.resume.allocation import companion  # late: as `_watch_over` says

            companion.end_earlier(self._allocation)
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
                is_first = step is None
                planned, step = started
                if is_first:
                    self._context.clock.wait(self._context.wake, STEP_FIRST_SECONDS)
                if is_first and not self._fence.restarts:
                    # What it loads, it loads while srun makes the step: the step would wait for it
                    # longer than sresctld hears of it earlier.
                    self._connect_beside_step(connect)
                watch = self._watch_over(planned, step, following)
                ending, noticed = watch.until_end()
                self._step_nodes, self._lives = watch.nodes, self._training.lives
                cause = classify(ending)
                self._recovery.look_back(
                    self._history.endings, watch.nodes, ending.ran_for, ending.made_progress
                )
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
        while not step.wait(LOOK_SECONDS):
            self._fence.mend()
        return step.code

    # -- one attempt --------------------------------------------------------------------------

    def _start(self, number: int, *, again: bool) -> tuple[PlannedAttempt, StepSet] | None:
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
            self._recovery.tasks_per_node if again else 0,
        )
        forget_attempt(fence.directory)
        attempt = fence.raise_for(planned.attempt)
        earlier = [ending.observed for ending in self._history.endings]
        planned = self._hangs.begin(msgspec.structs.replace(planned, attempt=attempt), earlier)
        self._allocation.own_nodes = attempt.step_nodes
        nodes = list(attempt.step_nodes)
        if again:
            report.say(f"starting attempt {number} on {fold(nodes)}")
            context.events.write("relaunched", attempt=number, nodes=nodes)
        context.wake.clear()
        # Before its tasks run: this host may die in the moment in which they begin.
        context.link.attempt(AttemptStarted(number, attempt.step_nodes))
        self._history.start(number, attempt.step_nodes, context.clock.now())
        # A living step has one part: each would have to be joined in an allocation of its own.
        lives = self._lives and not planned.parts
        step = start_first_step(context, planned, lives=lives, again=again)
        if step is None:
            return None
        context.events.write("started", attempt=number, nodes=nodes)
        return planned, StepSet(step, max(1, len(planned.parts)))

    def _watch_over(
        self, planned: PlannedAttempt, step: StepSet, following: NextAttempt | None
    ) -> AttemptWatch:
        # Late: a first step waits for nothing that only its end, or a fault, needs.
        from slurm_resilience.resume.attempt_watch import AttemptWatch

        return AttemptWatch(
            self._context,
            planned,
            step,
            fence=self._fence,
            history=self._history,
            recovery=self._recovery,
            training=self._training,
            hangs=self._hangs,
            block=following.block if following is not None else None,
        )

    @cached_property
    def _training(self) -> TrainingWatch:
        from slurm_resilience.resume.live_step.training import TrainingWatch  # late: as above

        return TrainingWatch(self._context, self._fence, lives=self._lives)

    @cached_property
    def _recovery(self) -> Recovery:
        from slurm_resilience.resume.recovery import Recovery  # late: as above

        return Recovery(self._context, self._step_size, self._min_nodes)

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

    # -- what comes next ----------------------------------------------------------------------

    def _next(self, cause: Cause, noticed: float, number: int) -> NextAttempt | None:
        """Prepare what follows attempt ``number``; None: the end."""
        return self._recovery.prepare(
            cause, self._history.endings, self._step_nodes, attempt=number, noticed=noticed
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
        if self._allocation.companions.held:
            from slurm_resilience.resume.allocation import companion  # there already

            companion.release_all(self._allocation)
        self._context.link.close()
        if not self._keeps_history:
            self._history.remove()
        self._fence.remove()

    def _end_by(self, number: int) -> None:
        self._clean_up()
        self._host_calls.end_by(number)
