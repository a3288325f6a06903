"""What Slurm was asked before Python was there: the plugin's questions about a flagged srun.

spank/early_questions.c starts the commands, and tells of them in `$SRES_EARLY`. That srun becomes
the supervisor, which has their answers when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import NamedTuple

from slurm_resilience.clock import SYSTEM_CLOCK

VARIABLE = "SRES_EARLY"
_NEXT_COMMAND = "\x1e"
_NEXT_WORD = "\x1f"
_LOOK_SECONDS = 0.005
"""Between two looks at a process, where the kernel does not tell of its end (before Linux 5.3)."""


class Printed(NamedTuple):
    """A command that has ended."""

    code: int
    output: bytes
    errors: bytes


class _Command(NamedTuple):
    """One that runs, or has ended; it is a child of this process."""

    pid: int
    output: int
    errors: int


class EarlyQuestions:
    """Commands that run already; `CliClient` takes each one in place of starting it."""

    def __init__(self, told: str) -> None:
        """
        Args:
            told: the value of `VARIABLE`. What is not of its form is passed over.
        """
        self._commands: dict[tuple[str, ...], _Command] = {}
        for entry in told.split(_NEXT_COMMAND):
            numbers, words = entry.split(_NEXT_WORD)[:3], entry.split(_NEXT_WORD)[3:]
            if words and all(number.isascii() and number.isdecimal() for number in numbers):
                command = _Command(*map(int, numbers))
                with contextlib.suppress(OSError):
                    for descriptor in command[1:]:
                        os.set_inheritable(descriptor, False)
                    self._commands[tuple(words)] = command

    def __bool__(self) -> bool:
        return bool(self._commands)

    def mark(self, words: Sequence[str]) -> str:
        """Return the word before each field of these jobs' listing; empty: none was asked for.

        Args:
            words: squeue's, up to the format.
        """
        found = (asked[-1] for asked in self._commands if asked[1:-1] == tuple(words))
        return next(found, "").partition("%")[0]

    def answer(self, argv: Sequence[str], timeout: float) -> Printed | None:
        """Return what the command with these words printed, for one caller; None: it is not there.

        Args:
            argv: the command's path, and its words.
            timeout: seconds that it may still take; it is killed then.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        command = self._commands.pop(tuple(argv), None)
        if command is None:
            return None
        try:
            if not _wait(command.pid, timeout):
                os.kill(command.pid, signal.SIGKILL)
                os.waitpid(command.pid, 0)
                raise subprocess.TimeoutExpired(argv, timeout)
            code = os.waitstatus_to_exitcode(os.waitpid(command.pid, 0)[1])
            return Printed(code, _read(command.output), _read(command.errors))
        except OSError:
            # No child of ours, or its output cannot be read: the caller starts it himself.
            return None
        finally:
            _close(command)

    def close(self) -> None:
        """End those that nobody has taken."""
        while self._commands:
            _, command = self._commands.popitem()
            with contextlib.suppress(OSError):
                # Without this a number that is no child of ours would be killed.
                if os.waitpid(command.pid, os.WNOHANG) == (0, 0):
                    os.kill(command.pid, signal.SIGKILL)
                    os.waitpid(command.pid, 0)
            _close(command)


def _wait(pid: int, timeout: float) -> bool:
    """Return whether a child has ended within so many seconds; it is not taken away."""

    def has_ended() -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, pid, flags) is not None

    if has_ended():
        return True
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        deadline, nothing = SYSTEM_CLOCK.monotonic() + timeout, threading.Event()
        while not has_ended() and SYSTEM_CLOCK.monotonic() < deadline:
            SYSTEM_CLOCK.wait(nothing, _LOOK_SECONDS)
        return has_ended()
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _close(command: _Command) -> None:
    for descriptor in (command.output, command.errors):
        with contextlib.suppress(OSError):
            os.close(descriptor)
