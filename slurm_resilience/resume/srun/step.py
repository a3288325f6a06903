"""One srun: its process, its standard error, and how a step is ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from slurm_resilience.child_exits import PASSING_ERRORS
from slurm_resilience.clock import Clock, SystemClock
from slurm_resilience.errors import MissingTool, SlurmUnreachable, SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.srun.command import BY_PLUGIN, GUARD
from slurm_resilience.resume.srun.job_log import JobLog
from slurm_resilience.resume.srun.quiet_lines import QuietLines
from slurm_resilience.resume.srun.srun_process import SrunProcess
from slurm_resilience.resume.srun.stderr_reader import (
    PROLOG_FAILED,
    EndedTasks,
    SrunReport,
    StderrReader,
    code_of,
    killed_from_outside,
)
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.resume.task_labels import TaskLabels, TaskNumbers
from slurm_resilience.slurm.client import SlurmClient, StepInfo

if TYPE_CHECKING:
    import subprocess

_READ_BYTES = 65536
_PIPE_BYTES = 1 << 20
OUTPUT_SECONDS = 1.0
"""Between two looks whether srun's last output has been passed on."""
CANCEL_SECONDS = 10.0
"""For the tasks of a step that Slurm was told to kill."""
CANCEL_LOOK_SECONDS = 0.05
LAST_WORDS_SECONDS = 0.1
"""For what an srun still prints when its tasks are gone."""
RETRY_SECONDS = 1.0
"""Until Slurm is told again to end tasks that were left behind."""
SAY_SECONDS = 60.0
"""Between two lines that they are still there."""
KILL_SECONDS = 5.0
"""For an srun to end that was killed."""


class ToldEnd(NamedTuple):
    """All that Slurm and srun have told of a step's end by another one than the supervisor."""

    cancelled: bool
    """Slurm reported that it was cancelled."""
    aborted: bool
    """Slurm ended it, and srun gave no cause."""
    killed_after: int = 0
    """Reports of tasks that were killed after that, and not by srun."""


class EndByUs(msgspec.Struct):
    """The supervisor's own part in the end of a step."""

    killed_srun: bool = False
    """Its srun waited for a node that is gone, and we killed it: this is no signal of the user."""
    cancelled_before: bool | None = None
    """`ToldEnd` had this before our first order; None: there was no order."""
    signalled_before: bool | None = None
    """Slurm had only told its tasks to end, before the first order; None: there was none."""
    aborted_before: bool | None = None
    """The same, before our first SIGKILL."""
    ended_before: int | None = None
    """So many ended tasks were told of before our first order."""


class RelayedOutput(msgspec.Struct):
    """The part of srun's output that was passed on."""

    numbers: TaskNumbers | None
    """Those of its tasks in a whole, for the labels of their lines; None: they are its own."""
    quiet: int = 0
    """So often the user said --quiet."""
    size_bytes: int = 0
    srun_ended_at: float = 0.0
    """When srun ended, all of its output passed on or not; 0: it runs."""
    writing: set[int] = msgspec.field(default_factory=set)
    """Our own files that are written to."""
    threads: list[threading.Thread] = msgspec.field(default_factory=list)

    @property
    def living_thread(self) -> threading.Thread | None:
        """Return one that still passes output on; None: all of it was."""
        return next((thread for thread in self.threads if thread.is_alive()), None)


class SrunStep:
    """A running srun.

    Made in the main thread only: the parent whose death ends srun is the thread that forked it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[], None],
        has_terminal: bool = False,
        on_news: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        stdin: int | None = None,
        name: str = "",
        reports: StepReports | None = None,
        numbers: TaskNumbers | None = None,
        quiet: int = 0,
    ) -> None:
        """
        Args:
            argv: srun and its arguments.
            environment: of srun.
            on_end: called (in a thread) when srun has ended.
            has_terminal: its task has a pseudo terminal (--pty), so standard output is srun's own.
                Standard error is read and passed on, to see what Slurm says of the step; where
                standard output else goes to the same place it is read too, through the same pipe:
                their order would change.
            on_news: called (in a thread) when srun has said something of a node or a task, or that
                Slurm ends the step.
            clock: the time; None: the machine's.
            stdin: open file for its standard input; None: the supervisor's own.
            name: the step's in Slurm, as far as it is known: ``12.`` before Slurm has numbered it.
            reports: what slurmstepd tells of its tasks; None: it tells nothing.
            numbers: of its tasks in a whole, by which srun's labels are to count; None: as they do.
            quiet: so often the user said --quiet: it prints all, which is left out on the way.

        Raises:
            SlurmUnreachable: srun cannot be started now.
            MissingTool: it cannot be started at all.
        """
        self.name = name
        self.reports = reports or StepReports("")
        self.log = JobLog(name.partition(".")[0])
        self.clock = clock or SystemClock()
        self.started = self.clock.monotonic()
        self.ended_at = 0.0
        self._stderr = StderrReader()
        self._by_us = EndByUs()
        self.tasks_ended_at: float | None = None
        """When Slurm had shown that its tasks are gone, or had ended them and had the time for it;
        None: that is not known."""
        self.job_outlives_it = False
        """Slurm told that it ends this step, and showed the step's job as running after that: a
        person has cancelled the step, however soon the job ends too."""
        self._relayed = RelayedOutput(numbers, quiet)
        self._on_end, self._on_news = on_end, on_news
        self._process = self._launch(argv, environment, stdin, has_terminal)

    def _launch(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None,
        has_terminal: bool,
    ) -> SrunProcess | subprocess.Popen[bytes]:
        # By the number of our own file: the pipe to it. srun writes standard output itself, where
        # it can.
        shared = not has_terminal and _same_file(1, 2)
        relayed = (1, 2) if self._relayed.numbers is not None and not shared else (2,)
        pipes: dict[int, tuple[int, int]] = {}
        try:
            for number in relayed:
                pipes[number] = _pipe()
            files = (stdin, _sink(pipes, 2 if shared else 1), _sink(pipes, 2))
            process = _start(argv, environment, files)
        except OSError as error:
            for source, _ in pipes.values():
                os.close(source)
            if error.errno in PASSING_ERRORS:
                raise SlurmUnreachable(f"{argv[0]} cannot be started now: {error}") from None
            raise MissingTool(f"{argv[0]} cannot be started: {error}") from None
        finally:
            for _, sink in pipes.values():
                os.close(sink)
        try:
            self._start_threads(process, pipes)
        except RuntimeError as error:  # no more threads, and its end would not be seen
            process.kill()
            process.wait()
            raise SlurmUnreachable(f"{argv[0]} cannot be started now: {error}") from None
        return process

    def _start_threads(
        self, process: SrunProcess | subprocess.Popen[bytes], pipes: dict[int, tuple[int, int]]
    ) -> None:
        """Read srun's output, and wait for its end.

        Raises:
            RuntimeError: no thread can be started now.
        """
        for number, (source, _) in pipes.items():
            relay = threading.Thread(
                target=self._pass_on, args=(source, number), name="output", daemon=True
            )
            relay.start()
            self._relayed.threads.append(relay)
        self._waiter = threading.Thread(
            target=self._wait, args=(process,), name="srun", daemon=True
        )
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cancelled(self) -> bool:
        """Return whether Slurm reported that this step was cancelled."""
        return any(map(self._is_own, self._stderr.cancelled_steps))

    @property
    def timed_out(self) -> bool:
        """Return whether Slurm reported that this step was cancelled at its time limit."""
        return any(map(self._is_own, self._stderr.timed_out_steps))

    @property
    def preempted(self) -> bool:
        """Return whether Slurm reported that it preempted or requeued the step's job: no person
        cancelled the step, and no task failed."""
        return any(map(self._is_own, self._stderr.preempted_steps))

    def _is_own(self, name: str) -> bool:
        """Return whether a step's name is this one's: what tasks print may name any other."""
        whole = not self.name or self.name.endswith(".")
        return name.startswith(self.name) if whole else name == self.name

    @property
    def forced(self) -> bool:
        """Return whether srun reported that a signal made it end the step."""
        return SrunReport.FORCED in self._stderr.report

    @property
    def failed_nodes(self) -> frozenset[str]:
        """Return the nodes that Slurm gave up while the step ran, or as it was to begin there."""
        return self._stderr.failed_nodes | self.prolog_nodes

    @property
    def failed_launches(self) -> dict[str, str]:
        """Return the nodes on which srun could start no task, with its words for the reason: it has
        ended the step for that."""
        return {node: why for node, why in self._launch_failures() if why != PROLOG_FAILED}

    @property
    def prolog_nodes(self) -> frozenset[str]:
        """Return the nodes on which the job's prolog failed as the step was to begin there: Slurm
        drains them, and ends or requeues the job."""
        return frozenset(node for node, why in self._launch_failures() if why == PROLOG_FAILED)

    def _launch_failures(self) -> Iterator[tuple[str, str]]:
        for launch in self._stderr.failed_launches:
            if self._is_own(launch.step):
                yield launch.node, launch.why

    @property
    def job(self) -> int:
        """Return the job that it runs in; 0: it is not known."""
        number = self.name.partition(".")[0]
        return int(number) if number.isdecimal() else 0

    @property
    def ends_others(self) -> bool:
        """Return whether srun reported that it ends its tasks for one that failed."""
        return SrunReport.ENDED_BY_SRUN in self._stderr.report

    @property
    def ended_by_itself(self) -> bool:
        """Return whether srun has ended, and neither it nor Slurm told that anything but its tasks'
        own ends has ended the step: then it has told of each task that failed."""
        ended_others = self.killed_by or self._by_us.killed_srun or self.ends_from_outside
        return not (self.running or ended_others)

    @property
    def ends_from_outside(self) -> bool:
        """Return whether Slurm, srun or a signal ends the step, or its tasks cannot be started."""
        return SrunReport.ENDED_FROM_OUTSIDE in self._stderr.report

    @property
    def heard_all(self) -> bool:
        """Return whether srun has ended, and has waited for the end of each task on the nodes that
        Slurm has not given up: then it has told of each that failed. Words on the end of another
        step, which a task may print, are no reason against it."""
        gave_up = self._stderr.report & (SrunReport.FORCED | SrunReport.TIMED_OUT)
        by_slurm = any(map(self._is_own, self._stderr.ended_steps))
        by_us = self._by_us.killed_srun
        return not (self.running or self.killed_by or by_us or gave_up or by_slurm)

    @property
    def ended_tasks(self) -> list[EndedTasks]:
        """Return what srun reported of tasks that did not end well."""
        return self._stderr.ended_tasks

    @property
    def running(self) -> bool:
        return self.ended_at == 0.0

    @property
    def code(self) -> int:
        """Return the exit code as a shell shows it; 0 while it runs."""
        if self._by_us.killed_srun and self.ended_tasks:
            return max(code_of(ended.how) for ended in self.ended_tasks)
        code = self._process.returncode or 0
        if code == 0 and not self.running and self._lacks_tasks:
            return 1
        return 128 - code if code < 0 else code

    @property
    def _lacks_tasks(self) -> bool:
        """Return whether a task could not be started, for which srun ends as if all were well."""
        return SrunReport.NOT_LAUNCHED in self._stderr.report and not self.reports.all_ended

    @property
    def was_answered(self) -> bool:
        """Return whether slurmctld has answered srun; else it has ended without a step."""
        return self._has_begun or SrunReport.UNANSWERED not in self._stderr.report

    @property
    def refused(self) -> str:
        """Return srun's words for the reason for which it got no step; empty: it had one."""
        return "" if self._has_begun else self._stderr.refused

    @property
    def had_threads(self) -> bool:
        """Return whether srun could start its threads; else it has ended without a task."""
        return self._has_begun or SrunReport.NO_THREAD not in self._stderr.report

    @property
    def _has_begun(self) -> bool:
        return self.reports.step is not None or bool(self.ended_tasks)

    @property
    def aborted(self) -> bool:
        """Return whether Slurm ended the step, and srun had given no cause before.

        The user cancelled it then. (slurmstepd's own line for it is sometimes lost, and is not
        there at all where the step's first node is gone.) Where srun goes on for longer than it
        waits for such a step, it was the word of another srun, which a task ran.
        """
        return SrunReport.ABORTED in self._stderr.report and self._is_recent(
            self._stderr.aborted_at
        )

    @property
    def only_signalled(self) -> bool:
        """Return whether Slurm told its tasks to end, and has not ended it: so it begins to preempt
        a job, and ends it when its GraceTime is over. What a person cancels it ends at once. Our
        own order does not count, nor srun's own where it could start no task, nor what was told of
        a task's own srun, long before."""
        words, before = self._stderr, self._by_us.signalled_before
        aborted = words.was_aborted and self._is_recent(words.aborted_at)
        aborted = aborted and (self.aborted or not self.failed_launches)
        return (self.told_end.cancelled and not aborted) if before is None else before

    @property
    def may_be_ending(self) -> bool:
        """Return whether it has just been told that the step ends, and srun runs still."""
        told, words = self.told_end, self._stderr
        is_told = told.aborted or (told.cancelled and self._is_recent(words.cancelled_at))
        return self.running and is_told

    def _is_recent(self, told_at: float) -> bool:
        ended_at = self._relayed.srun_ended_at or self.ended_at
        return self._stderr.is_recent(told_at, ended_at or self.clock.monotonic())

    @property
    def told_end(self) -> ToldEnd:
        """Return what was told of its end before our own order, by which Slurm says the same."""
        cancelled, aborted = self._by_us.cancelled_before, self._by_us.aborted_before
        return ToldEnd(
            self.cancelled if cancelled is None else cancelled,
            self.aborted if aborted is None else aborted,
            self._killed_after_abort(),
        )

    def _killed_after_abort(self) -> int:
        """Count reports of tasks that were killed after srun's word on its step's end, and before
        any order of ours."""
        first = self._stderr.ended_before_abort
        if first is None or self.ends_others:
            return 0
        ends = tuple(self.ended_tasks)[first : self._by_us.ended_before]
        return sum(killed_from_outside([ended]) for ended in ends)

    def ends_by_us(self, *, killed: bool) -> None:
        """Note that the supervisor is about to have Slurm end the step.

        Args:
            killed: by SIGKILL. After SIGTERM alone srun does not say that its step was aborted.
        """
        told = self.told_end
        self._by_us.signalled_before = self.only_signalled
        if self._by_us.ended_before is None:
            self._by_us.ended_before = len(self.ended_tasks)
        self._by_us.cancelled_before = told.cancelled
        if killed:
            self._by_us.aborted_before = told.aborted

    @property
    def killed_by(self) -> int:
        """Return the signal by which srun itself was ended, if not by us, or 0."""
        return 0 if self._by_us.killed_srun else max(0, -(self._process.returncode or 0))

    @property
    def may_leave_tasks(self) -> bool:
        """Return whether srun was killed, and its tasks may live on."""
        return (self._process.returncode or 0) < 0 and self.tasks_ended_at is None

    @property
    def ran_for(self) -> float:
        return (self.ended_at or self.clock.monotonic()) - self.started

    def send_signal(self, number: int) -> None:
        """Send a signal to srun while it runs."""
        if self.running:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill an srun that waits for a node that is gone."""
        self._by_us.killed_srun |= self.running
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for srun's end; True when it came within this time."""
        self._waiter.join(timeout=seconds)
        return not self._waiter.is_alive()

    def _wait(self, process: SrunProcess | subprocess.Popen[bytes]) -> None:
        process.wait()
        seen = -1
        # All of srun's output is waited for, however slowly ours is read, but not that of a child
        # which srun left behind with the pipe open.
        relayed = self._relayed
        relayed.srun_ended_at = self.clock.monotonic()
        while thread := relayed.living_thread:
            if not relayed.writing and relayed.size_bytes == seen:
                break
            seen = relayed.size_bytes
            thread.join(timeout=OUTPUT_SECONDS)
        self.ended_at = self.clock.monotonic()
        self._on_end()

    def _pass_on(self, source: int, number: int) -> None:
        """Copy srun's output as it comes to a file of ours, and read along its standard error."""
        relayed = self._relayed
        labels = TaskLabels(relayed.numbers) if relayed.numbers is not None else None
        lines = QuietLines(relayed.quiet if number == 2 else 0)
        while data := os.read(source, _READ_BYTES):
            relayed.writing.add(number)
            shown = lines.take(data)
            _write(number, labels.take(shown) if labels is not None else shown)
            relayed.size_bytes += len(data)
            relayed.writing.discard(number)
            if number == 2 and self._stderr.read(data, self.clock.monotonic()):
                self._on_news()
        rest = lines.rest()
        _write(number, labels.take(rest) + labels.rest() if labels is not None else rest)
        os.close(source)


def _write(number: int, data: bytes) -> None:
    # Our own file may be closed; srun would not die of it either.
    with contextlib.suppress(OSError):
        report.write_all(number, memoryview(data))


def _start(
    argv: Sequence[str], environment: Mapping[str, str], files: Sequence[int | None]
) -> SrunProcess | subprocess.Popen[bytes]:
    """Start srun. kill -9 of the supervisor ends it, as it does with plain srun.

    Its other files are as plain srun has them: `-o >(gzip >log.gz)` names one. Ours are closed by
    exec.

    Args:
        argv: srun and its arguments.
        environment: of srun.
        files: its standard input, output and error; None: our own.

    Raises:
        OSError: it cannot be started.
    """
    parent = os.getpid()
    if environment.get(GUARD) == BY_PLUGIN:
        return SrunProcess(argv, dict(environment) | {GUARD: str(parent)}, files)
    # Late: only an srun without our plugin needs them.
    import subprocess

    from slurm_resilience.child_group import end_with_parent

    stdin, stdout, stderr = files
    return subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        close_fds=False,
        preexec_fn=lambda: end_with_parent(signal.SIGKILL, parent),
    )


def _sink(pipes: Mapping[int, tuple[int, int]], number: int) -> int | None:
    return pipes[number][1] if number in pipes else None


def _pipe() -> tuple[int, int]:
    source, sink = os.pipe()
    with contextlib.suppress(OSError):  # beyond the user's share
        fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return source, sink


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def ask_to_end(step: SrunStep, client: SlurmClient, job: int, host: str) -> StepInfo | None:
    """Send SIGTERM to a step's tasks; return what Slurm knows of the step.

    Args:
        step: the srun.
        client: asks Slurm.
        job: job id.
        host: this machine's name as Slurm shows it at the step (`SrunHost:Pid`).
    """
    info = find_step(step, client, job, host)
    if info is not None and (name := info.step):
        step.ends_by_us(killed=False)
        _is_accepted(lambda: client.cancel_step(job, name, "TERM"))
    return info


def end_step(
    step: SrunStep,
    client: SlurmClient,
    job: int,
    host: str,
    *,
    grace: float,
    at_once: bool,
    dead: Collection[str] = (),
) -> None:
    """End a step that has lost, or must leave, one of its nodes.

    Living nodes' tasks are ended through Slurm. srun itself may wait for the dead node for minutes,
    and so may Slurm's books, so srun is killed once no living task is left. That no two attempts
    write at once holds by three things: each living node has reported the end of its tasks (else
    the books, or `CANCEL_SECONDS`, are waited for); on a dead node no task lives, or its own sresd
    ends them; and the next attempt's token makes this one stale before it starts.

    Args:
        step: the srun.
        client: asks Slurm.
        job: job id.
        host: this machine's name as Slurm shows it at the step (`SrunHost:Pid`).
        grace: seconds between SIGTERM and SIGKILL.
        at_once: the node is dead, its peers hang in a collective: SIGKILL without a grace.
        dead: nodes that are dead.
    """
    if at_once:
        info = find_step(step, client, job, host)
    else:
        info = ask_to_end(step, client, job, host)
        if info is not None and info.step and step.wait(grace):
            return
    if info:
        ordered = _is_accepted(lambda: _cancel_shown(step, client, job, host))
        deadline = step.clock.monotonic() + CANCEL_SECONDS
        while step.clock.monotonic() < deadline and not step.wait(CANCEL_LOOK_SECONDS):
            if _has_no_living_task(step, info, dead) or not _is_running(step, client, job, host):
                ordered = True
                # Its tasks are gone: a moment for their last words, which srun still prints.
                step.wait(LAST_WORDS_SECONDS)
                break
        step.tasks_ended_at = step.clock.monotonic() if ordered else None
    step.ends_by_us(killed=True)
    step.kill()
    step.wait(KILL_SECONDS)


def _has_no_living_task(step: SrunStep, info: StepInfo, dead: Collection[str]) -> bool:
    """Return whether srun, or slurmstepd, has told of the end of all tasks on the living nodes.

    srun tells of tasks that failed alone, slurmstepd of each one. They are not added up: the
    numbers of slurmstepd's may be those of a world of several steps.
    """
    by_srun = tuple(step.ended_tasks)  # a copy: it grows in another thread
    told = [EndedTasks((end.node,), (end.task,), "") for end in step.reports.ends()]
    return no_living_task(by_srun, info, dead) or no_living_task(told, info, dead)


def end_tasks_left(
    step: SrunStep,
    client: SlurmClient,
    job: int,
    host: str,
    *,
    patience: float,
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    """End the tasks that an srun left behind which was killed: Slurm could not be asked then.

    Args:
        step: the srun.
        client: asks Slurm.
        job: job id.
        host: this machine's name as Slurm shows it at the step (`SrunHost:Pid`).
        patience: seconds in which Slurm must take the order.
        stop: set when the user ends this.
        say: tells the user what is waited for.

    Raises:
        SresError: Slurm did not take the order. The tasks may live, so nothing may follow.
    """
    clock = step.clock
    began, told = clock.monotonic(), float("-inf")
    while True:
        try:
            is_shown = _cancel_shown(step, client, job, host)
            break
        except SresError as error:
            if clock.monotonic() - began > patience or clock.wait(stop, RETRY_SECONDS):
                raise
            if clock.monotonic() - told > SAY_SECONDS:
                told = clock.monotonic()
                say(f"the tasks of the step before are still to be ended: {error}")
    deadline = clock.monotonic() + CANCEL_SECONDS
    while is_shown and clock.monotonic() < deadline:
        if not _is_running(step, client, job, host) or clock.wait(stop, CANCEL_LOOK_SECONDS):
            break
    step.tasks_ended_at = clock.monotonic()


def no_living_task(ended: Sequence[EndedTasks], info: StepInfo, dead: Collection[str]) -> bool:
    """Return whether the living nodes of a step have reported the end of all of its tasks. Pure.

    Args:
        ended: the tasks of which srun or slurmstepd reported that they ended.
        info: the step as Slurm shows it.
        dead: nodes from which no report comes.
    """
    nodes = {*info.nodes, *dead}  # Slurm may have taken dead ones off the step
    living = nodes - set(dead)
    reports = [report for report in ended if living & set(report.nodes)]
    if not living or not info.tasks or living - {node for r in reports for node in r.nodes}:
        return False
    tasks = {task for report in reports for task in report.tasks}
    # Tasks are dealt out evenly, give or take one; more than that are not missing for the dead.
    on_dead = -(-info.tasks // len(nodes)) * (len(nodes) - len(living))
    return info.tasks - len(tasks) <= on_dead


def find_step(step: SrunStep, client: SlurmClient, job: int, host: str) -> StepInfo | None:
    """Return what Slurm knows of the step; None: it does not know it, or does not answer."""
    try:
        return _shown_step(step, client, job, host)
    except SresError:
        return None


def _shown_step(step: SrunStep, client: SlurmClient, job: int, host: str) -> StepInfo | None:
    short = host.split(".", maxsplit=1)[0]
    for info in client.steps(job):
        same_host = info.srun_host.split(".", maxsplit=1)[0] == short
        if info.srun_pid == step.pid and same_host:
            return info
    return None


def _cancel_shown(step: SrunStep, client: SlurmClient, job: int, host: str) -> bool:
    """Have Slurm end the step if it shows it; return whether it does.

    The step is looked for by its srun each time: Slurm may have requeued the job meanwhile, and
    then a step of the next run, another supervisor's, has the same number.
    """
    info = _shown_step(step, client, job, host)
    if info is not None:
        # A person may have cancelled it while Slurm was asked.
        step.ends_by_us(killed=True)
        client.cancel_step(job, info.step)
    return info is not None


def _is_running(step: SrunStep, client: SlurmClient, job: int, host: str) -> bool:
    try:
        return _shown_step(step, client, job, host) is not None
    except SresError:
        return True


def _is_accepted(call: Callable[[], object]) -> bool:
    """Return whether Slurm took an order; not: the step is over already, or Slurm is away."""
    try:
        call()
    except SresError:
        return False
    return True
