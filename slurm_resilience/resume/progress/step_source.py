"""Steps of programs that tell none: from a file that they write, or from a pattern in the log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from slurm_resilience.errors import UsageError
from slurm_resilience.resume import report
from slurm_resilience.resume.progress.hang_rule import ANY_RANK
from slurm_resilience.resume.progress.step_report import MOST_STEPS, StepLine

OPTION = "auto-resume-progress"
LOOK_SECONDS = 1.0
READ_BYTES = 1 << 20
"""As much of a log is read in one look; what came before it in between is left out."""
LINE_BYTES = 4096
SEARCH_SECONDS = 2.0
"""Processor time of one look. A pattern may take for ever on a line that does not match, and then
nothing else of the supervisor would run."""
_LINE_ENDS = rb"[\r\n]"
"""Progress bars write their line anew by a carriage return."""
OWN_LINES = b"sres: "
"""The supervisor's lines in the log speak of steps too."""


class StepSource(Protocol):
    """Another source of steps than the tasks' own words."""

    def look(self) -> list[StepLine]:
        """Return the steps since the last look, oldest first."""
        ...


class WatchedFile(StepSource):
    """A file that the program writes anew, or makes longer, as it goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._state()
        self._changes = 0

    def look(self) -> list[StepLine]:
        state = self._state()
        if state is None or state == self._seen:
            return []
        self._seen = state
        self._changes += 1
        return [StepLine(ANY_RANK, self._changes, has_number=False)]

    def _state(self) -> tuple[int, int, int] | None:
        try:
            about = self._path.stat()
        except OSError:
            return None
        return about.st_mtime_ns, about.st_size, about.st_ino


class WatchedLog(StepSource):
    """The job's log: the last line that matches, of those since the last look, is a step. Its first
    group is the number, if any."""

    def __init__(self, pattern: re.Pattern[bytes], path: Path) -> None:
        self._pattern = pattern
        self._path = path
        self._place = self._size()
        self._rest = b""
        self._count = 0
        self._is_slow = False
        """The pattern has taken too long, and is searched for no more."""

    def look(self) -> list[StepLine]:
        if not self._is_slow:
            *lines, self._rest = re.split(_LINE_ENDS, self._rest + self._new())
            self._rest = self._rest[-LINE_BYTES:]
            try:
                with _processor_time(SEARCH_SECONDS):
                    return self._steps_in(lines)
            except _TookTooLong:
                self._is_slow = True
                report.say(
                    f"--{OPTION}=log:{self._pattern.pattern.decode(errors='replace')} takes more "
                    f"than {SEARCH_SECONDS:g} s for the log of one second (several `.*` or `+` in "
                    "a row, say): no steps are read from the log any more, and no hang is found"
                )
        return [StepLine(ANY_RANK, None)]  # where no step can be seen, none is missed

    def _steps_in(self, lines: Iterable[bytes]) -> list[StepLine]:
        found = []
        for line in lines:
            if line.startswith(OWN_LINES):
                continue
            match = self._pattern.search(line[-LINE_BYTES:])
            if match is not None:
                self._count += 1
                number = _number(match)
                found.append(
                    StepLine(ANY_RANK, self._count, has_number=False)
                    if number is None
                    else StepLine(ANY_RANK, number)
                )
        # Programs, and srun too, hold lines back and write many at once. Taken for as many steps in
        # no time, they would make a hang of the wait for the next lot.
        return found[-1:]

    def _new(self) -> bytes:
        try:
            # A pipe must not be waited for.
            number = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(number, "rb") as file:
                about = os.fstat(number)
                if not stat.S_ISREG(about.st_mode):
                    return b""
                size = about.st_size
                if size < self._place:
                    self._place = 0  # it was emptied
                file.seek(max(self._place, size - READ_BYTES))
                data = file.read(READ_BYTES)
                self._place = file.tell()
        except OSError:
            return b""
        return data

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


class _TookTooLong(Exception):
    """The processor time is used up."""


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """End what runs in here, in the main thread, when this process has used so much of it."""

    def end(*_: object) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _number(match: re.Match[bytes]) -> int | None:
    words = match.groups()
    text = words[0] if words else None
    number = int(text) if text and text.isdigit() and len(text) < 19 else None
    return number if number is None or number <= MOST_STEPS else None


def step_source(word: str, directory: Path, log: Path | None) -> StepSource | None:
    """Return the source that `--auto-resume-progress` names; None: it names none.

    Args:
        word: the option's value: `file:PATH`, `log:REGEX`; empty: none.
        directory: in which srun was started.
        log: the file behind standard output; None: it is none that can be read again.

    Raises:
        UsageError: the value is neither of the two, or there is no such log.
    """
    kind, colon, value = word.partition(":")
    if not word:
        return None
    if not colon or not value or kind not in ("file", "log"):
        raise UsageError(f"--{OPTION}={word}: write file:PATH, or log:REGEX")
    if kind == "file":
        return WatchedFile(directory / value)
    try:
        pattern = re.compile(value.encode())
    except re.error as error:
        raise UsageError(f"--{OPTION}: {value!r} is no regular expression: {error}") from None
    if log is None:
        raise UsageError(
            f"--{OPTION}=log:…: standard output goes to no file that can be read again; leave out "
            "srun's --output, or watch that file with file:PATH"
        )
    return WatchedLog(pattern, log)
