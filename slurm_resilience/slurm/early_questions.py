"""The plugin's questions to Slurm about a flagged srun, asked before Python is there.

spank/early_questions.c has a process start the commands, and tells of them in `$SRES_EARLY`. That
srun becomes the supervisor, which has their answers when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from slurm_resilience.clock import SYSTEM_CLOCK

VARIABLE = "SRES_EARLY"
_NEXT_COMMAND = "\x1e"
_NEXT_WORD = "\x1f"
NUMBER_BYTES = 4
"""The size of each number in what is told of a command's end: its place in the list, its status."""


class Unanswered(Exception):
    """A command took longer than it may."""


class Printed(NamedTuple):
    """A command that has ended."""

    code: int
    output: bytes
    errors: bytes


class _Command(NamedTuple):
    place: int
    output: int
    errors: int


class EarlyQuestions:
    """Commands that run already; `CliClient` takes each one in place of starting it."""

    def __init__(self, told: str) -> None:
        """
        Args:
            told: the value of `VARIABLE`. What is not of its form is passed over.
        """
        self._asker = 0
        """The process that has started them, and leads their group."""
        self._ends = -1
        """It writes here when one has ended."""
        self._statuses: dict[int, int] = {}
        self._commands: dict[tuple[str, ...], _Command] = {}
        first, *entries = told.split(_NEXT_COMMAND)
        try:
            self._asker, self._ends = map(int, first.split(_NEXT_WORD))
            os.set_inheritable(self._ends, False)
            for place, entry in enumerate(entries):
                output, errors, *words = entry.split(_NEXT_WORD)
                command = _Command(place, int(output), int(errors))
                for descriptor in command[1:]:
                    os.set_inheritable(descriptor, False)
                self._commands[tuple(words)] = command
        except (ValueError, OSError, OverflowError):
            self._commands.clear()

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
            timeout: seconds that it may still take.

        Raises:
            Unanswered: it took longer.
        """
        command = self._commands.pop(tuple(argv), None)
        if command is None:
            return None
        try:
            status = self._wait(command.place, SYSTEM_CLOCK.monotonic() + timeout)
            if status is None:
                return None
            output, errors = _read(command.output), _read(command.errors)
            return Printed(os.waitstatus_to_exitcode(status), output, errors)
        except TimeoutError:
            raise Unanswered from None
        except (OSError, ValueError):
            # It cannot be read: the caller asks himself.
            return None
        finally:
            _close(command.output, command.errors)

    def _wait(self, place: int, deadline: float) -> int | None:
        """Return a command's status, once it has ended; None: its end is not told.

        Raises:
            TimeoutError: it has not ended by then.
        """
        poll = select.poll()
        poll.register(self._ends, select.POLLIN)
        while place not in self._statuses:
            left = max(0.0, deadline - SYSTEM_CLOCK.monotonic())
            if not poll.poll(left * 1000):
                raise TimeoutError
            told = os.read(self._ends, 2 * NUMBER_BYTES)
            if len(told) < 2 * NUMBER_BYTES:
                return None
            ended = int.from_bytes(told[:NUMBER_BYTES], sys.byteorder)
            self._statuses[ended] = int.from_bytes(told[NUMBER_BYTES:], sys.byteorder)
        return self._statuses[place]

    def close(self) -> None:
        """End those that still run, and let go of what they printed."""
        for command in self._commands.values():
            _close(command.output, command.errors)
        self._commands.clear()
        asker, self._asker = self._asker, 0
        if asker <= 1:
            return
        with contextlib.suppress(OSError):
            # What is no child of ours is left alone.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, asker, flags) is None:
                os.killpg(asker, signal.SIGKILL)
            os.waitpid(asker, 0)
        _close(self._ends)


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
