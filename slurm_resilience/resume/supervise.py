"""Supervise: keep one step of a job alive. The loop that `srun --auto-resume=1` becomes.

start srun → it ends, or a node of it turns bad → classify → plan → relaunch | swap | requeue | stop
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError, UsageError
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import attempt as program_side
from slurm_resilience.resume import carrier, fence, report, signals
from slurm_resilience.resume.classify import Cause, Ending, classify
from slurm_resilience.resume.environment import (
    Attempt,
    srun_environment,
    task_variables,
    wrapped,
)
from slurm_resilience.resume.link import Link
from slurm_resilience.resume.plan import Facts, Plan, plan
from slurm_resilience.resume.srun_options import SrunCommand
from slurm_resilience.resume.step import Step, end_step
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.hostlists import expand, fold
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    NodeVerdict,
    RequeueRequest,
)

GUARD = "SRES_SUPERVISED"
PERSON_SECONDS = 60.0
"""A step that ends this soon after a person's signal ended because of it (KillWait is 30 s)."""
SALLOC_SECONDS = 5.0
"""How long one try for a node lasts; in between the supervisor looks around."""
TWICE_SECONDS = 2.0
"""srun asks for the second Ctrl-C "within 1 sec" and counts whole seconds of the clock."""
STILL_WAITING = 60.0
FENCE_LOOK = 10.0
"""Seconds between two looks whether the fence stands: without it no checkpoint is written."""
NO_FENCE = "a cut-off node is ended by its sresd alone"


class Supervisor:
    """One supervised srun."""

    def __init__(
        self,
        config: Config,
        client: SlurmClient,
        link: Link,
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
        self._srun = srun
        self._command = command
        self._job = job
        self._has_plugin = has_plugin
        self._permits_expansion = permits_expansion
        self._environment = dict(environment)
        self._first_nodes = job.nodes
        self._step_size, self._step_nodes = _step_nodes(command, job, environment)
        self._host = socket.gethostname()
        self._wake = threading.Event()
        self._link.news = self._wake
        self._signals: list[tuple[float, int]] = []
        self._step: Step | None = None
        self._starting = threading.Lock()
        self._leave = threading.Event()
        """A person wants to end this, and no step was running that could have been told."""
        self._base = _working_directory()
        self._directory = fence.open_directory(self._base, job.id, os.getpid())
        self._token = ""
        self._events = report.EventLog(environment.get("SRES_EVENTS", ""))
        self._history: list[Ending] = []
        self._restarts = _leading_number(environment.get("SLURM_RESTART_COUNT"))

    def run(self) -> int:
        """Until the program ends for good; srun's exit code (as a shell shows it)."""
        signals.receive(self._on_signal)
        if self._directory:
            fence.revoke_older(self._base, self._job.id, self._directory)
        else:
            report.say(f"no directory to fence in: {NO_FENCE}")
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
            fence.remove(self._directory)

    # -- one attempt --------------------------------------------------------------------------

    def _start(self, number: int) -> Step:
        job_nodes = self._in_slurms_order(self._job.nodes)
        step_nodes = self._in_slurms_order(self._step_nodes)
        attempt = Attempt(
            job=self._job.id,
            number=number,
            restarts=self._restarts,
            step_nodes=step_nodes,
            job_nodes=job_nodes,
            master_address=self._client.node(step_nodes[0]).address or step_nodes[0],
            directory=self._directory,
        )
        attempt = self._raise_fence(attempt)
        variables = task_variables(attempt)
        command = self._command
        if number > 1:
            # The user's own choice of nodes named some that are gone.
            command = command.without("nodelist", "exclude", "nodefile", "relative", "nodes")
            command = command.adding(f"--nodes={len(step_nodes)}", f"--nodelist={fold(step_nodes)}")
        changed = set(self._job.nodes) != set(self._first_nodes)
        environment = srun_environment(self._environment, job_nodes, changed)
        # srun's own defaults, and what it hands on with --export=ALL.
        environment |= {
            name: value for name, value in variables.items() if not value.startswith("@")
        }
        argv = [self._srun]
        if self._has_plugin:
            environment[GUARD] = "1"
            argv += [f"{carrier.OPTION}={carrier.encode(variables)}", *command.argv]
        else:
            argv += _without_plugin(command, variables).argv
        if number > 1:
            self._events.write("relaunched", attempt=number, nodes=list(step_nodes))
        self._wake.clear()
        with self._starting:
            step = Step(argv, environment, self._wake.set, relay_stderr=not command.has("pty"))
            self._step = step
            if self._leave.is_set():
                step.send_signal(signal.SIGTERM)  # it came while this step was being prepared
        self._link.attempt(AttemptStarted(number, step_nodes))
        self._events.write("started", attempt=number, nodes=list(step_nodes))
        return step

    def _raise_fence(self, attempt: Attempt) -> Attempt:
        """Raise this attempt's fence; without a directory where that cannot be done."""
        self._token = attempt.token
        problem = fence.raise_fence(self._directory, attempt.token)
        if not problem:
            return attempt
        report.say(f"no fence can be raised ({problem}): {NO_FENCE}")
        self._directory = ""
        return msgspec.structs.replace(attempt, directory="")

    def _mend_fence(self) -> None:
        """Somebody removed our directory: every program would take itself for an old attempt, and
        write no checkpoint any more. After a requeue the fence was taken from us on purpose."""
        if fence.holds(self._directory, self._token):
            return
        try:
            job = self._client.job(self._job.id)
        except SresError:
            return  # looked at again in a while
        if job.state != "RUNNING" or job.restarts != self._restarts:
            return
        problem = fence.raise_fence(self._directory, self._token)
        if not problem:
            report.say(f"{self._directory} had been removed, and was made again; leave it alone")

    def _watch(self, step: Step) -> tuple[Ending, float]:
        """Wait until the step ends, or must be ended; when that was noticed (epoch)."""
        before = program_side.read_progress(self._directory)
        stopped = False
        noticed = 0.0
        stays: frozenset[str] = frozenset()
        while step.running:
            if not self._wake.wait(FENCE_LOOK):
                self._mend_fence()
                continue
            if not step.running:
                break
            self._wake.clear()
            bad = self._link.faulty()
            if bad and frozenset(bad) != stays and not self._can_be_left(bad):
                stays = frozenset(bad)
            elif bad and frozenset(bad) != stays:
                noticed = time.time()
                worst = next((v for v in bad.values() if v.verdict == "dead"), None)
                first = worst or next(iter(bad.values()))
                report.say(f"node {first.node} must be left ({first.reason}); the step is ended")
                self._events.write("noticed", nodes=sorted(bad))
                stopped = True
                end_step(
                    step,
                    self._client,
                    self._job.id,
                    self._host,
                    grace=self._limits.grace,
                    at_once=worst is not None,
                )
                break
        noticed = noticed or time.time()
        self._events.write("step_ended", code=step.code)
        return self._ending(step, stopped, before), noticed

    def _can_be_left(self, bad: Mapping[str, NodeVerdict]) -> bool:
        """Is there anywhere to go? If not, a step on nodes that still work runs on: whoever marked
        them waits for the jobs on them."""
        if any(verdict.verdict == "dead" for verdict in bad.values()):
            return True
        self._refresh_job()
        cause = Cause("node", "", tuple(sorted(bad)))
        chosen = plan(cause, self._facts(""), tuple(self._history), self._limits)
        if chosen.kind != "stop":
            return True
        names = fold(bad)
        reasons = "; ".join(f"{name}: {verdict.reason}" for name, verdict in bad.items())
        report.say(f"{names} should be left ({reasons}), but {chosen.reason}: the step runs on")
        return False

    def _ending(self, step: Step, stopped: bool, before: int) -> Ending:
        faulty = {name: v.reason for name, v in self._link.faulty().items()}
        state = self._job.state
        # A program that ended well, or was ended, is not kept waiting for Slurm's word.
        if step.code != 0 and not self._interrupted(step, stopped):
            state = self._refresh_job()
            if state == "RUNNING" and not faulty and not step.cancelled:
                faulty = self._wait_for_diagnosis()
                state = self._refresh_job()
        return Ending(
            code=step.code,
            ran_for=step.ran_for,
            progressed=program_side.read_progress(self._directory) > before,
            job_state=state,
            faulty=faulty,
            interrupted=self._interrupted(step, stopped),
            cancelled=step.cancelled or (step.aborted and not faulty),
            stopped_by_us=stopped,
        )

    def _wait_for_diagnosis(self) -> dict[str, str]:
        """A step that fails because of a node often ends before anybody has judged the node."""
        deadline = time.monotonic() + self._limits.diagnosis_wait
        self._link.ask(self._step_nodes)
        while True:
            bad = {name: v.reason for name, v in self._link.faulty().items()}
            bad |= self._bad_in_slurm()
            left = deadline - time.monotonic()
            if bad or left <= 0 or self._leave.is_set():
                return bad
            self._wake.clear()
            self._wake.wait(min(left, 0.5))

    def _bad_in_slurm(self) -> dict[str, str]:
        """The step's nodes that Slurm itself says are no longer usable."""
        try:
            nodes = {node.name: node for node in self._client.nodes()}
            held = set(self._client.job(self._job.id).nodes)
        except SresError:
            return {}
        bad = {}
        for name in self._step_nodes:
            node = nodes.get(name)
            if node is None or node.is_down or node.is_fail:
                bad[name] = _slurms_word(node)
            elif name not in held:
                bad[name] = "it is no longer in the job"
        return bad

    # -- what comes next ----------------------------------------------------------------------

    def _next(self, cause: Cause, noticed: float, number: int) -> report.Recovery | None:
        """Do what the plan says; None: the end."""
        step_ended = time.time()
        swap_failed = ""
        while True:
            chosen = plan(cause, self._facts(swap_failed), tuple(self._history), self._limits)
            code = self._history[-1].code
            self._link.send(AttemptEnded(number, code, f"{chosen.kind}: {chosen.reason}"))
            if chosen.kind == "stop":
                if cause.kind in ("node", "program"):
                    report.say(f"not resumed: {cause.reason}; {chosen.reason}")
                return None
            if chosen.kind == "requeue":
                self._requeue(cause, chosen)
                return None
            try:
                done = self._obtain(cause, chosen)
            except (SlurmError, NotFound) as error:
                if self._leave.is_set():
                    return None
                if self._refresh_job() != "RUNNING":
                    report.say(f"not resumed: {error}")
                    return None
                if isinstance(error, SlurmUnreachable):
                    # It was away, and is back: the same again, from what it says now.
                    continue
                report.say(f"no exchange of nodes: {error}")
                swap_failed = f"the exchange of nodes failed ({error})"
                continue
            if done is None:
                return None
            self._events.write("nodes_ready", nodes=list(self._step_nodes))
            return report.Recovery(
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
        leave = [name for name in chosen.leave if name in self._job.nodes]
        if chosen.kind == "relaunch":
            if chosen.nodes:
                self._step_nodes = chosen.nodes
            where = fold(self._step_nodes)
            return f"the step runs again on {where} ({chosen.reason})"
        if leave:
            keep = [name for name in self._job.nodes if name not in leave]
            self._client.shrink(self._job.id, keep)
        added = self._grow(chosen.take)
        if added is None:
            return None
        self._refresh_job()
        gone = set(cause.nodes)
        self._step_nodes = (*[n for n in self._step_nodes if n not in gone], *added)
        return f"{fold(cause.nodes)} exchanged for {fold(added)}; now on {fold(self._step_nodes)}"

    def _grow(self, count: int) -> tuple[str, ...] | None:
        """Add nodes to the job. None: a person's signal came while it waited for one."""
        began = time.monotonic()
        said = began
        have = set(self._client.job(self._job.id).nodes)
        while True:
            try:
                helper = self._client.allocate_for(self._job, count, SALLOC_SECONDS, self._leave)
                break
            except (SlurmUnreachable, NotFound):
                raise
            except SlurmError as error:
                waited = time.monotonic() - began
                if waited > self._limits.swap_wait:
                    raise SlurmError(f"no idle node within {waited:.0f} s") from error
                if time.monotonic() - said > STILL_WAITING or said == began:
                    said = time.monotonic()
                    why = "none is free" if "queued and waiting" in str(error) else str(error)
                    limit = self._limits.swap_wait
                    report.say(
                        f"waiting for {count} idle node(s) since {waited:.0f} s, for {limit:.0f} s "
                        f"at most: {why}"
                    )
            if self._leave.is_set():
                return None
            # Also ends the wait when the job itself is gone (NotFound).
            self._client.job(self._job.id)
        try:
            nodes = self._client.merge(helper, self._job.id)
        except SresError:
            self._client.cancel_job(helper)
            raise
        return tuple(name for name in nodes if name not in have)

    def _requeue(self, cause: Cause, chosen: Plan) -> None:
        """Ask sresctld, which also lifts Slurm's two minutes of waiting; else do it ourselves.

        The requeue ends this very process, so nothing after it may matter.
        """
        report.say(f"{cause.reason}; {chosen.reason}")
        self._events.write("requeue", reason=chosen.reason)
        if self._link.connected.is_set():
            self._link.send(RequeueRequest(f"{cause.reason}; {chosen.reason}"))
            deadline = time.monotonic() + self._limits.requeue_wait
            while time.monotonic() < deadline:
                self._wake.clear()
                self._wake.wait(0.5)
                if self._refresh_job() != "RUNNING" or self._leave.is_set():
                    return
        report.say("sresctld does not requeue the job: asking Slurm, which waits two minutes")
        self._client.requeue(self._job.id)

    def _tell_recovered(self, recovery: report.Recovery, number: int) -> None:
        report.block(
            msgspec.structs.replace(
                recovery,
                relaunched=time.time(),
                from_step=program_side.read_progress(self._directory),
            )
        )

    # -- facts --------------------------------------------------------------------------------

    def _facts(self, swap_failed: str) -> Facts:
        nodes = {node.name: node for node in self._client.nodes()}
        has_gres = bool(self._job.gres) or any(
            nodes[name].gres for name in {*self._job.nodes, *self._first_nodes} if name in nodes
        )
        return Facts(
            job_nodes=self._in_slurms_order(self._job.nodes),
            step_size=self._step_size,
            has_gres=has_gres,
            permits_expansion=self._permits_expansion,
            is_batch=self._job.is_batch,
            requeue=self._job.requeue,
            batch_host=self._job.batch_host,
            swap_failed=swap_failed,
        )

    def _refresh_job(self) -> str:
        """Read the job again; its state, empty when Slurm does not know it any more.

        slurmctld may be away for a while, e.g. to be updated.
        """
        began = time.monotonic()
        said = False
        while True:
            try:
                self._job = self._client.job(self._job.id)
                return self._job.state
            except NotFound:
                return ""
            except SlurmUnreachable as error:
                if self._leave.wait(1.0) or time.monotonic() - began > self._limits.swap_wait:
                    raise
                if not said:
                    report.say(f"waiting for slurmctld: {error}")
                said = True

    def _in_slurms_order(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Ranks follow Slurm's table of nodes, whatever the order of a hostlist."""
        order = {node.name: index for index, node in enumerate(self._client.nodes())}
        return tuple(sorted(names, key=lambda name: order.get(name, len(order))))

    # -- signals ------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals, srun_too: bool) -> None:
        """Called in the thread of `signals.receive`."""
        with self._starting:
            self._signals.append((time.monotonic(), number))
            running = self._step is not None and self._step.running
            if running and not srun_too:
                assert self._step is not None
                self._step.send_signal(number)
            if not running and (number in signals.ENDING or number == signal.SIGINT):
                self._leave.set()
        self._wake.set()

    def _interrupted(self, step: Step, stopped: bool) -> str:
        """The person's signal that ended this step, or that came after it, if there is one.

        One Ctrl-C only asks srun for its state; two within a second end the step.
        """
        recent = [
            (at, number)
            for at, number in self._signals
            if at >= step.started and (step.ended_at or time.monotonic()) - at < PERSON_SECONDS
        ]
        for _, number in recent:
            if number in signals.ENDING:
                return signal.Signals(number).name
        interrupts = [at for at, number in recent if number == signal.SIGINT]
        if any(second - first < TWICE_SECONDS for first, second in pairwise(interrupts)):
            return "SIGINT twice"
        at_once = self._leave.is_set() or any(
            self._command.has(option) for option in ("quit-on-interrupt", "disable-status")
        )
        # A task that died of SIGINT did so because of a person, who may have sent it with scancel.
        died_of_it = step.code == 128 + signal.SIGINT and not stopped
        if died_of_it or (interrupts and at_once):
            return "SIGINT"
        return "a signal" if step.forced else ""

    def _last_code(self, step: Step) -> int:
        if step.killed_by and self._history and not self._history[-1].stopped_by_us:
            self._link.close()
            fence.remove(self._directory)
            signals.end_by(step.killed_by)
        return step.code

    def _left(self) -> int:
        """The code when a person ended this while no step was running."""
        if self._history:
            return self._history[-1].code
        number = next(n for _, n in self._signals if n in signals.ENDING or n == signal.SIGINT)
        self._link.close()
        fence.remove(self._directory)
        signals.end_by(number)
        return 128 + number


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:
        return Path("/dev/null")  # removed meanwhile: nothing can be made in there


def _slurms_word(node: Node | None) -> str:
    if node is None:
        return "Slurm does not know it any more"
    return f"Slurm shows {node.state}" + (f" ({node.reason})" if node.reason else "")


def _step_nodes(
    command: SrunCommand, job: Job, environment: Mapping[str, str]
) -> tuple[int, tuple[str, ...]]:
    """How many nodes the step uses, and which.

    Raises:
        UsageError: a -w that is no hostlist.
    """
    chosen = command.value("nodelist")
    named = expand(chosen) if chosen and "/" not in chosen else ()
    count = _leading_number(command.value("nodes")) or _leading_number(
        environment.get("SLURM_NNODES", "")
    )
    count = min(count or len(job.nodes), len(job.nodes))
    tasks = _leading_number(command.value("ntasks"))
    if tasks and not command.has("nodes"):
        count = min(count, tasks)
    if named:
        unknown = [name for name in named if name not in job.nodes]
        if unknown:
            raise UsageError(f"--nodelist: {fold(unknown)} is not in job {job.id}")
        count = max(count, len(named)) if command.has("nodes") else len(named)
    excluded = command.value("exclude")
    left = [n for n in job.nodes if not excluded or n not in expand(excluded)]
    others = [n for n in left if n not in named]
    nodes = (*named, *others)[:count]
    return len(nodes), nodes


def _leading_number(text: str | None) -> int:
    digits = (text or "").split("-")[-1]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _without_plugin(command: SrunCommand, variables: Mapping[str, str]) -> SrunCommand:
    """The user's program behind a shell that exports the variables."""
    if command.multi_prog or not command.program:
        if command.multi_prog:
            report.say(
                "without the SPANK plugin --multi-prog tasks get no NODE_RANK and no SLURM_NODE"
            )
        return command
    if command.program[0].startswith("-"):
        raise UsageError(f"{command.program[0]}: write ./{command.program[0]} or its whole path")
    named = command
    if not command.has("job-name"):
        named = command.adding(f"--job-name={Path(command.program[0]).name}")
    return SrunCommand(named.options, wrapped(command.program, variables))
