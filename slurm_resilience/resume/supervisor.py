"""Supervise: keep one step of a job alive. The loop that `srun --auto-resume=1` becomes.

start srun → it ends, or a node of it turns bad → classify → plan → relaunch | swap | requeue | stop
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.model import Job
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation import swap
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.allocation.requeue import requeue
from slurm_resilience.resume.context import Context
from slurm_resilience.resume.decide.classify import Cause, Ending, classify
from slurm_resilience.resume.decide.plan import Plan, plan
from slurm_resilience.resume.evidence import gather_evidence
from slurm_resilience.resume.live_step import training as word
from slurm_resilience.resume.live_step.announced import Announced
from slurm_resilience.resume.live_step.join_step import SeatMap, living
from slurm_resilience.resume.live_step.live_step import LiveStep
from slurm_resilience.resume.live_step.live_steps import StepEnd
from slurm_resilience.resume.srun import signals
from slurm_resilience.resume.srun.command import (
    PLACEMENT,
    AttemptCommand,
    leading_number,
    step_nodes,
)
from slurm_resilience.resume.srun.environment import Attempt, srun_environment, task_variables
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.step import SrunStep, end_step
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.resume.ward import Ward
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.messages import AttemptEnded, AttemptStarted, NodeVerdict

FENCE_LOOK = 10.0
"""Seconds between two looks whether the fence stands: without it no checkpoint is written."""
MEETING_LOOK = 0.25
"""Seconds between two looks whether a training has announced itself."""
SEATS_LOOK = 1.0
"""Seconds between two looks who sits where, until all are seen: then the step is a living one."""


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
        permits_expansion: bool,
        environment: Mapping[str, str],
    ) -> None:
        """
        Args:
            srun: path of the real srun.
            command: its arguments, without --auto-resume.
            job: the job that the step runs in.
            has_plugin: srun carries our SPANK plugin (it sets the tasks' variables).
            permits_expansion: Slurm may grow jobs without GRES.
            environment: the supervisor's own.
        """
        self._limits = config.resume
        self._client = client
        self._link = link
        self._step_size, self._step_nodes = step_nodes(command, job, environment)
        self._wake = threading.Event()
        self._link.news = self._wake
        self._leave = threading.Event()
        """A person wants to end this, and no step was running that could have been told."""
        self._allocation = Allocation(
            client,
            job,
            self._leave,
            patience=self._limits.swap_wait,
            permits_expansion=permits_expansion,
        )
        self._person = UserSignals(self._wake, self._leave)
        self._events = report.EventLog(environment.get("SRES_EVENTS", ""))
        self._context = Context(
            limits=self._limits,
            client=client,
            allocation=self._allocation,
            link=link,
            launch=AttemptCommand(srun, has_plugin),
            command=command,
            environment=dict(environment),
            person=self._person,
            wake=self._wake,
            events=self._events,
            host=socket.gethostname(),
        )
        self._ward = Ward(client, job, leading_number(environment.get("SLURM_RESTART_COUNT")))
        self._announced = Announced(self._context, self._ward)
        self._attempt: Attempt | None = None
        self._history: list[Ending] = []

    def run(self) -> int:
        """Until the program ends for good; srun's exit code (as a shell shows it)."""
        signals.receive(self._person.on_signal)
        self._ward.begin()
        if self._ward.restarts:
            # Slurm may have emptied the log that said why.
            report.say(f"the job was requeued: this is its start number {self._ward.restarts + 1}")
        number, recovery, step = 1, None, None
        try:
            while True:
                if self._leave.is_set():
                    return self._left()
                step = self._start(number)
                if recovery is not None:
                    self._tell_recovered(recovery, number)
                ending, noticed = self._watch(step)
                self._history.append(ending)
                cause = classify(ending)
                recovery = self._next(cause, noticed, number)
                if recovery is None:
                    return self._last_code(step)
                number += 1
        except SresError as error:
            if step is None:
                raise
            report.say(f"not resumed: {error}")
            return self._last_code(step)
        finally:
            self._link.close()
            self._ward.remove()

    # -- one attempt --------------------------------------------------------------------------

    def _start(self, number: int) -> SrunStep:
        job_nodes = self._allocation.in_slurms_order(self._allocation.nodes)
        nodes = self._allocation.in_slurms_order(self._step_nodes)
        attempt = Attempt(
            job=self._allocation.id,
            number=number,
            restarts=self._ward.restarts,
            step_nodes=nodes,
            job_nodes=job_nodes,
            master_address=self._client.node(nodes[0]).address or nodes[0],
            directory=self._ward.directory,
        )
        word.forget(self._ward.directory)
        self._attempt = attempt = self._ward.around(attempt)
        lives, command = self._announced.lives, self._context.command
        if lives:
            command = living(command)
        if number > 1:
            # The user's own choice of nodes named some that are gone.
            command = command.without(*PLACEMENT)
            command = command.adding(f"--nodes={len(nodes)}", f"--nodelist={fold(nodes)}")
            if lives and not command.has("exclusive"):
                # Slurm may take a living step that lost a node for one that still runs.
                command = command.adding("--overlap")
        argv, environment = self._context.launch.line(
            command,
            task_variables(attempt),
            srun_environment(self._context.environment, job_nodes, self._allocation.changed),
        )
        if number > 1:
            self._events.write("relaunched", attempt=number, nodes=list(nodes))
        self._wake.clear()
        with self._person.starting:
            step = SrunStep(
                argv,
                environment,
                self._wake.set,
                relay_stderr=not command.has("pty"),
                on_news=self._wake.set if lives else lambda: None,
            )
            self._person.steps = [step]
            if self._leave.is_set():
                step.send_signal(signal.SIGTERM)  # it came while this step was being prepared
        self._link.attempt(AttemptStarted(number, nodes))
        self._events.write("started", attempt=number, nodes=list(nodes))
        return step

    def _watch(self, step: SrunStep) -> tuple[Ending, float]:
        """Wait until the attempt ends, or must be ended; when that was noticed (epoch)."""
        before = self._ward.progress()
        with contextlib.ExitStack() as stack:
            end = self._until_end(step, stack)
        self._events.write("step_ended", code=end.code)
        ending = gather_evidence(self._context, self._ward, end, self._step_nodes, before)
        return ending, end.noticed or time.time()

    def _until_end(self, step: SrunStep, stack: contextlib.ExitStack) -> StepEnd:
        stays: frozenset[str] = frozenset()
        training: tuple[Path, Observer] | None = None
        looked = time.monotonic()
        while step.running:
            pause = SEATS_LOOK if training else MEETING_LOOK
            news = self._wake.wait(pause if self._announced.lives else FENCE_LOOK)
            if time.monotonic() - looked >= FENCE_LOOK:
                looked = time.monotonic()
                self._ward.mend()
                self._announced.advise()
            if training is None and self._announced.lives:
                training = self._announced.meet(stack)
            if not step.running or not (news or training):
                continue
            self._wake.clear()
            bad = self._link.faulty()
            if bad and frozenset(bad) != stays and not self._can_be_left(bad):
                stays = frozenset(bad)
            elif bad and frozenset(bad) != stays:
                return self._stop(step, bad)
            if training is not None and not bad:
                assert self._attempt is not None
                world = self._announced.world(step, self._attempt.step_nodes, training[1])
                if world is not None:
                    return self._live(step, *training, world)
        return StepEnd(step.code, step)

    def _stop(self, step: SrunStep, bad: Mapping[str, NodeVerdict]) -> StepEnd:
        """End a step that must leave nodes."""
        noticed = time.time()
        worst = next((v for v in bad.values() if v.verdict == "dead"), None)
        first = worst or next(iter(bad.values()))
        report.say(f"node {first.node} must be left ({first.reason}); the step is ended")
        self._events.write("noticed", nodes=sorted(bad))
        end_step(
            step,
            self._client,
            self._allocation.id,
            self._context.host,
            grace=self._limits.grace,
            at_once=worst is not None,
        )
        return StepEnd(step.code, step, stopped_by_us=True, noticed=noticed)

    # -- a step that lives on -----------------------------------------------------------------

    def _live(self, step: SrunStep, meet: Path, training: Observer, world: SeatMap) -> StepEnd:
        assert self._attempt is not None
        attempt = LiveStep(
            self._context,
            training,
            meet,
            world,
            self._attempt,
            step,
            may_leave=self._can_be_left,
            mend=self._ward.mend,
            addresses=self._allocation.addresses(),
        )
        self._events.write("living", nodes=list(world.nodes), seats=world.seats)
        self._wake.set()
        try:
            end = attempt.watch()
        except SresError:
            raise
        except Exception as error:
            # A bug of ours is no reason to end a training that goes on without us.
            traceback.print_exc()
            report.say(f"the supervisor failed ({error!r}); the step goes on without its help")
            end = attempt.let_go()
        self._step_nodes = attempt.nodes
        return end

    def _can_be_left(self, bad: Mapping[str, NodeVerdict]) -> bool:
        """Is there anywhere to go? If not, a step on nodes that still work runs on: whoever marked
        them waits for the jobs on them."""
        if any(verdict.verdict == "dead" for verdict in bad.values()):
            return True
        self._allocation.refresh()
        cause = Cause("node", "", tuple(sorted(bad)))
        facts = self._allocation.facts(self._step_size, "")
        chosen = plan(cause, facts, tuple(self._history), self._limits)
        if chosen.kind != "stop":
            return True
        names = fold(bad)
        reasons = "; ".join(f"{name}: {verdict.reason}" for name, verdict in bad.items())
        report.say(f"{names} should be left ({reasons}), but {chosen.reason}: the step runs on")
        return False

    # -- what comes next ----------------------------------------------------------------------

    def _next(self, cause: Cause, noticed: float, number: int) -> report.RecoveryBlock | None:
        """Do what the plan says; None: the end."""
        step_ended = time.time()
        swap_failed, unanswered = "", 0
        while True:
            facts = self._allocation.facts(self._step_size, swap_failed)
            chosen = plan(cause, facts, tuple(self._history), self._limits)
            code = self._history[-1].code
            self._link.send(AttemptEnded(number, code, f"{chosen.kind}: {chosen.reason}"))
            if chosen.kind == "stop":
                if cause.kind in ("node", "program"):
                    report.say(f"not resumed: {cause.reason}; {chosen.reason}")
                return None
            if chosen.kind == "requeue":
                self._requeue(f"{cause.reason}; {chosen.reason}", chosen)
                return None
            try:
                done = self._obtain(cause, chosen)
            except (SlurmError, NotFound) as error:
                if self._leave.is_set():
                    return None
                if self._allocation.refresh() != "RUNNING":
                    report.say(f"not resumed: {error}")
                    return None
                unanswered += isinstance(error, SlurmUnreachable)
                if isinstance(error, SlurmUnreachable) and unanswered < swap.TRIES:
                    # It was away, and is back: the same again, from what it says now.
                    continue
                report.say(f"no exchange of nodes: {error}")
                swap_failed = f"the exchange of nodes failed ({error})"
                continue
            if done is None:
                return None
            self._events.write("nodes_ready", nodes=list(self._step_nodes))
            return report.RecoveryBlock(
                what=cause.reason,
                nodes=cause.nodes,
                done=done,
                attempt=number + 1,
                noticed=noticed,
                step_ended=step_ended,
                nodes_ready=time.time(),
                relaunched=0.0,
            )

    def _obtain(self, cause: Cause, chosen: Plan) -> str | None:
        """Get the nodes for the next attempt; what was done, in words. None: a person ended it."""
        if chosen.kind == "relaunch":
            if chosen.nodes:
                self._step_nodes = chosen.nodes
            where = fold(self._step_nodes)
            return f"the step runs again on {where} ({chosen.reason})"
        swap.shrink(self._allocation, chosen.leave)
        added = swap.grow(self._allocation, chosen.take, self._limits.swap_wait, self._leave)
        if added is None:
            return None
        self._allocation.refresh()
        gone = set(cause.nodes)
        self._step_nodes = (*[n for n in self._step_nodes if n not in gone], *added)
        return f"{fold(cause.nodes)} exchanged for {fold(added)}; now on {fold(self._step_nodes)}"

    def _requeue(self, reason: str, chosen: Plan) -> None:
        report.say(reason)
        self._events.write("requeue", reason=chosen.reason)
        requeue(self._allocation, self._link, self._wake, reason, self._limits.requeue_wait)

    def _tell_recovered(self, recovery: report.RecoveryBlock, number: int) -> None:
        report.block(
            msgspec.structs.replace(
                recovery,
                relaunched=time.time(),
                from_step=self._ward.progress(),
            )
        )

    # -- the end ------------------------------------------------------------------------------

    def _last_code(self, step: SrunStep) -> int:
        if not self._history:
            return step.code
        last = self._history[-1]
        if step.killed_by and last.code == step.code and not last.stopped_by_us:
            self._end_by(step.killed_by)
        return last.code

    def _left(self) -> int:
        """The code when a person ended this while no step was running."""
        if self._history:
            return self._history[-1].code
        number = self._person.ending()
        self._end_by(number)
        return 128 + number

    def _end_by(self, number: int) -> None:
        self._link.close()
        self._ward.remove()
        signals.end_by(number)
