"""Learn the command lines and environments of processes, whatever those hang in.

The kernel copies both out of a process's own memory, and waits for the lock on it. A process that
hangs in the kernel with that lock (its files are on a dead file server) holds up every reader, for
ever. So a child reads, and is killed when nothing more comes from it; one that cannot be killed is
left behind, and what it hangs at is not read again while it lives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import psutil

from slurm_resilience.agent.processes import process_child
from slurm_resilience.child_group import end_group

log = logging.getLogger("sresd.processes")

START_SECONDS = 10.0
"""Until the child's first answer: a node under load starts it slowly."""
QUIET_SECONDS = 2.0
"""Without a further answer: what is missing then hangs."""
KILL_SECONDS = 0.5


class ProcessText(NamedTuple):
    """The words of a process that are in its own memory."""

    title: str = ""
    """Its first words."""
    variables: Mapping[str, str] = MappingProxyType({})
    """Those of its environment that were asked for."""


class ProcessTexts(NamedTuple):
    """A reading of many processes."""

    texts: dict[psutil.Process, ProcessText]
    unreadable: frozenset[psutil.Process] = frozenset()
    """They live, and hold up every reader."""

    def of(self, process: psutil.Process) -> ProcessText:
        """Return the text of a process; an empty one where it was not read."""
        return self.texts.get(process, ProcessText())


class ProcessReader:
    """Starts the children; at most one is left behind for a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[psutil.Process, Callable[[], bool]] = {}
        """Processes at which a reader hangs that cannot be ended; tells whether it still does."""

    def read(self, processes: Iterable[psutil.Process], names: Sequence[str]) -> ProcessTexts:
        """Read some processes.

        Args:
            processes: of this machine.
            names: of the variables that are wanted.
        """
        with self._lock:
            self._left = {one: hangs for one, hangs in self._left.items() if hangs()}
            hanging = frozenset(self._left)
        wanted = {process.pid: process for process in processes if process not in hanging}
        answers = self._ask(wanted, names) if wanted else {}
        texts = {wanted[pid]: text for pid, text in answers.items()}
        missing = frozenset(process for pid, process in wanted.items() if pid not in answers)
        # It hangs, or has ended meanwhile.
        unreadable = frozenset(one for one in missing | hanging if one.is_running())
        if unreadable:
            pids = ", ".join(map(str, sorted(one.pid for one in unreadable)))
            log.warning("processes that hang in the kernel cannot be read: %s", pids)
        return ProcessTexts(texts, unreadable)

    def _ask(
        self, wanted: dict[int, psutil.Process], names: Sequence[str]
    ) -> dict[int, ProcessText]:
        try:
            child = _start(wanted, names)
        except OSError as error:
            # A job that has taken all process numbers must not keep itself from being ended.
            log.warning("no process can be started to read others: %s", error.strerror)
            answers, threads = _read_here(wanted, names)
            self._leave({wanted[pid]: thread.is_alive for pid, thread in threads.items()})
            return answers
        answers = _from_child(child, len(wanted))
        if not end_group(child, KILL_SECONDS):
            missing = (process for pid, process in wanted.items() if pid not in answers)
            self._leave(dict.fromkeys(missing, lambda: child.poll() is None))
        return answers

    def _leave(self, left: dict[psutil.Process, Callable[[], bool]]) -> None:
        with self._lock:
            self._left |= left


def _start(wanted: Iterable[int], names: Sequence[str]) -> subprocess.Popen[bytes]:
    question = os.memfd_create("processes")
    try:
        os.pwrite(question, json.dumps({"pids": list(wanted), "names": names}).encode(), 0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", process_child.__file__],
            stdin=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(question)


def _from_child(child: subprocess.Popen[bytes], number: int) -> dict[int, ProcessText]:
    """Return what a child tells until it has told all, or ends, or is quiet."""
    answers: dict[int, ProcessText] = {}
    assert child.stdout is not None
    with child.stdout as source, selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        rest, patience = b"", START_SECONDS
        while len(answers) < number and selector.select(patience):
            data = os.read(source.fileno(), 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            answers |= dict(map(_answer, lines))
            patience = QUIET_SECONDS
    return answers


def _read_here(
    wanted: Iterable[int], names: Sequence[str]
) -> tuple[dict[int, ProcessText], dict[int, threading.Thread]]:
    """Read in threads of this process; return those too that hang."""
    answers: dict[int, ProcessText] = {}
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threads: dict[int, threading.Thread] = {}
    for pid in wanted:
        try:
            threads |= process_child.read_all((pid,), names, lines.put)
        except RuntimeError:
            break  # there is no room for a thread either
    with contextlib.suppress(queue.Empty):
        while len(answers) < len(threads):
            answers |= [_answer(lines.get(timeout=QUIET_SECONDS))]
    return answers, {pid: thread for pid, thread in threads.items() if pid not in answers}


def _answer(line: bytes) -> tuple[int, ProcessText]:
    said = json.loads(line)
    return said["pid"], ProcessText(" ".join(said["words"]), said["variables"])
