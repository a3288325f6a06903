"""One srun: its process, its standard error, and how a step is ended."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from slurm_resilience.errors import MissingTool, SresError
from slurm_resilience.slurm import client as client_side
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.hostlists import expand

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

# What Slurm prints when a step is cancelled by a person; by a node failure it says so.
_CANCELLED = re.compile(
    rb"^[^\n]{0,9}slurmstepd[^ ]*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT [0-9T:.-]+ "
    rb"(\*\*\*|DUE TO TIME LIMIT)",
    re.MULTILINE,
)
# What srun prints when a signal made it end its step.
_FORCED = b"srun: forcing job termination"
# What srun prints when it is told that its step is over, and an error of its own that would be the
# cause: anything that is not about how a task ended.
_ABORTED = b"srun: Job step aborted"
_CAUSE = re.compile(rb"^srun: error: (?!\S+: tasks? [\d,-]+: )", re.MULTILINE)
# A node that Slurm gave up under a step that lives on, and tasks that ended badly.
_NODE_FAILURE = re.compile(rb"^srun: error: Node failure on (\S+)$", re.MULTILINE)
_TASK_ENDED = re.compile(rb"^srun: error: (\S+): tasks? ([\d,-]+): ([^\n]*)$", re.MULTILINE)
# srun itself ends a step whose task failed (--kill-on-bad-exit), or whose node it has lost touch
# with, and Slurm words that the same.
_SRUN_ENDS = re.compile(rb"srun: (?:[^\n]*Terminating StepId=|error: Aborting, )")
_LINE_LIMIT = 65536


class EndedTasks(NamedTuple):
    """Tasks of which srun said that they ended badly."""

    nodes: tuple[str, ...]
    tasks: tuple[int, ...]
    how: str


class SrunStep:
    """A running srun.

    Made in the main thread only: the parent whose death ends srun is the thread that forked it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[], None],
        relay_stderr: bool = True,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            argv: srun and its arguments.
            environment: of srun.
            on_end: called (in a thread) when srun has ended.
            relay_stderr: read srun's standard error and pass it on, to see what Slurm says of the
                step. Off for a pseudo terminal, which srun owns. Where standard output goes to the
                same place it is read too, through the same pipe: else their order would change.
            on_news: called (in a thread) when srun has said something of a node or a task.

        Raises:
            MissingTool: srun cannot be started.
        """
        self.started = time.monotonic()
        self.ended_at = 0.0
        self.cancelled = False
        """Slurm said that the step was cancelled."""
        self.forced = False
        """srun said that a signal made it end the step."""
        self.failed_nodes: set[str] = set()
        """Slurm gave these nodes up while the step ran."""
        self.ended_tasks: list[EndedTasks] = []
        """What srun said of tasks that did not end well."""
        self.put_down = False
        """Its srun waited for a node that is gone, and was killed by us: nobody's signal."""
        self._aborted = False
        self._has_cause = False
        self._srun_ends = False
        self._passed = 0
        self._writing = False
        parent = os.getpid()

        def in_child() -> None:
            # srun 22.05 comes to us with these blocked, and a child inherits the mask.
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            # kill -9 of the supervisor must end the step, as it does with plain srun.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        self._on_news = on_news
        source, sink = os.pipe() if relay_stderr else (-1, None)
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdout=sink if _same_file(1, 2) else None,
                stderr=sink,
                preexec_fn=in_child,
            )
        except OSError as error:
            raise MissingTool(f"{argv[0]} cannot be started: {error}") from None
        finally:
            if sink is not None:
                os.close(sink)
        self._relay = threading.Thread(
            target=self._pass_on, args=(source,), name="stderr", daemon=True
        )
        if relay_stderr:
            self._relay.start()
        self._on_end = on_end
        self._waiter = threading.Thread(target=self._wait, name="srun", daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self.ended_at == 0.0

    @property
    def code(self) -> int:
        """The exit code as a shell shows it; 0 while it runs."""
        if self.put_down and self.ended_tasks:
            return max(code_of(ended.how) for ended in self.ended_tasks)
        code = self._process.returncode or 0
        return 128 - code if code < 0 else code

    @property
    def aborted(self) -> bool:
        """Slurm ended the step, and srun gave no cause: somebody cancelled it, if no node is at
        fault. (slurmstepd's own word for it is sometimes lost.)"""
        return self._aborted and not self._has_cause and not self._srun_ends

    @property
    def killed_by(self) -> int:
        """The signal by which somebody ended srun itself, or 0."""
        return 0 if self.put_down else max(0, -(self._process.returncode or 0))

    @property
    def ran_for(self) -> float:
        return (self.ended_at or time.monotonic()) - self.started

    def send_signal(self, number: int) -> None:
        if self.running:
            self._process.send_signal(number)

    def put_to_death(self) -> None:
        """End an srun that waits for a node that is gone."""
        self.put_down = self.put_down or self.running
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """True when srun ended within this time."""
        self._waiter.join(timeout=seconds)
        return not self._waiter.is_alive()

    def _wait(self) -> None:
        self._process.wait()
        seen = -1
        # All of srun's output is waited for, whoever reads ours, but not that of a child which
        # srun left behind with the pipe open.
        while self._relay.is_alive() and (self._writing or self._passed != seen):
            seen = self._passed
            self._relay.join(timeout=1.0)
        self.ended_at = time.monotonic()
        self._on_end()

    def _pass_on(self, source: int) -> None:
        """Copy srun's standard error as it comes, and read along."""
        rest = b""
        while data := os.read(source, 65536):
            self._writing = True
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(2, view) :]
            except OSError:
                pass  # nobody reads our standard error any more; srun would not die of it either
            self._passed += len(data)
            self._writing = False
            rest = (rest + data)[-_LINE_LIMIT:]
            self._read_along(rest)
            rest = rest[rest.rfind(b"\n") + 1 :]
        os.close(source)

    def _read_along(self, text: bytes) -> None:
        if _SRUN_ENDS.search(text):
            self._srun_ends = True
        if b"CANCELLED AT" in text and _CANCELLED.search(text) and not self._srun_ends:
            self.cancelled = True
        if _FORCED in text:
            self.forced = True
        if _ABORTED in text:
            self._aborted = True
        lines = text[: text.rfind(b"\n") + 1]
        if _CAUSE.search(lines):
            self._has_cause = True
        for nodes in _NODE_FAILURE.findall(lines):
            self.failed_nodes.update(_expanded(nodes))
            self._on_news()
        for nodes, tasks, how in _TASK_ENDED.findall(lines):
            numbers = tuple(int(n[1:]) for n in _expanded(b"t[" + tasks + b"]"))
            self.ended_tasks.append(
                EndedTasks(_expanded(nodes), numbers, how.decode("utf-8", "replace"))
            )
            self._on_news()


def code_of(how: str) -> int:
    """A task's exit code as a shell shows it, from srun's words on its end; 1: not to be read."""
    told = re.search(r"exit code (\d+)", how)
    if told:
        return int(told[1])
    words = how.partition(" (")[0].strip()  # "Aborted (core dumped)"
    names = {signal.strsignal(number): 128 + number for number in signal.Signals}
    return names.get(words, 1)


def _expanded(hostlist: bytes) -> tuple[str, ...]:
    """Names in a line that may be a program's and not srun's: then there are none."""
    try:
        return expand(hostlist.decode())
    except (SresError, UnicodeDecodeError):
        return ()


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def end_step(
    step: SrunStep, client: SlurmClient, job: int, host: str, *, grace: float, at_once: bool
) -> None:
    """End a step that has lost, or must leave, one of its nodes.

    Living nodes' tasks are ended through Slurm. srun itself may wait for the dead node for minutes,
    so it is killed once no living task is left.

    Args:
        host: this machine's name as Slurm shows it at the step (`SrunHost:Pid`).
        grace: seconds between SIGTERM and SIGKILL.
        at_once: the node is dead, its peers hang in a collective: SIGKILL without a grace.
    """
    found = find_step(step, client, job, host)
    name = found.step if found else ""
    if name and not at_once:
        _try(lambda: client.cancel_step(job, name, "TERM"))
        if step.wait(grace):
            return
    if name:
        _try(lambda: client.cancel_step(job, name))
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and not step.wait(0.05):
            if not _is_running(client, job, name):
                # Its tasks are gone: a moment for their last words, which srun still prints.
                step.wait(0.1)
                break
    step.put_to_death()
    step.wait(5.0)


def find_step(
    step: SrunStep, client: SlurmClient, job: int, host: str
) -> client_side.StepInfo | None:
    """What Slurm knows of the step: the one whose srun is ours."""
    try:
        steps = client.steps(job)
    except SresError:
        return None
    short = host.split(".", maxsplit=1)[0]
    for found in steps:
        same_host = found.srun_host.split(".", maxsplit=1)[0] == short
        if found.srun_pid == step.pid and same_host:
            return found
    return None


def _is_running(client: SlurmClient, job: int, name: str) -> bool:
    try:
        return any(step.step == name for step in client.steps(job))
    except SresError:
        return True


def _try(call: Callable[[], None]) -> None:
    try:
        call()
    except SresError:
        return  # it is over already, or Slurm is away: killing srun ends it all the same
