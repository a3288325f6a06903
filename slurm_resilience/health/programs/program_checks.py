"""A site's own checks: every executable in a directory is one.

A program ends with 0 (well), 1 (worth watching) or 2 (a fault); anything else is unjudged, as for
Nagios, and so is a fault without a word. The first line that it prints is the finding's text; a
fault asks for a reboot, unless that line begins with another action and a colon: `replace: the fan
is dead`. Whatever else it prints, on standard error too, goes into a log of its own, where it is
not what the last run printed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.programs.program_listing import NoListing, ProgramLister
from slurm_resilience.model import FAULTY, Finding, Severity
from slurm_resilience.trusted_paths import refuse_users, untrusted

log = logging.getLogger("sresd.checks")

DIRECTORY = "checks_directory"
"""The check of checks.directory itself."""
TIMEOUT_SECONDS = 60.0
KILL_SECONDS = 2.0
"""Seconds beyond the time limit in which a killed program has to end."""
MAX_OUTPUT_BYTES = 1 << 16
MAX_LINE_CHARACTERS = 400
MAX_LOG_BYTES = 1 << 18
"""Bytes of a program's log; one older file is kept."""
WELL, WATCH, FAULT = 0, 1, 2
"""Exit codes."""
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C"}


class ProgramEnd(NamedTuple):
    """The end of a program, and the first line that it printed."""

    code: int
    line: str
    output: str = ""
    """All that it printed: standard output, then standard error."""


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class ProgramLog:
    """The log of one program. Its last entry is that of its last run, or equals it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last: tuple[int, str] | None = None

    def note(self, end: ProgramEnd, now: float) -> None:
        """Note the end of a run, where it differs from the one before it. A log that cannot be
        written keeps no check from running.

        Args:
            end: of the run.
            now: seconds since the epoch.
        """
        if (end.code, end.output) == self._last:
            return
        self._last = (end.code, end.output)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        text = "".join(f"  {line}\n" for line in end.output.splitlines())
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            refuse_users(self._file.parent)
            with contextlib.suppress(FileNotFoundError):
                if self._file.stat().st_size >= MAX_LOG_BYTES:
                    self._file.replace(self._file.with_suffix(".log.1"))
            # A program that root runs may print what other users must not read.
            descriptor = os.open(self._file, _APPEND, 0o640)
            with os.fdopen(descriptor, "a", encoding="utf-8") as log_file:
                log_file.write(f"{stamp} ended with {end.code}\n{text}")
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error.strerror)


def program_checks(
    directory: str, disabled: tuple[str, ...] = (), logs: Path | None = None
) -> tuple[Check, ...]:
    """Return a check for each executable in a directory; where it cannot be read, one that says so.

    Args:
        directory: of the programs; empty: there are none.
        disabled: names of those that are left out.
        logs: takes a log of each; None: there is none.
    """
    if not directory:
        return ()
    try:
        names = ProgramLister(directory).names()
    except NoListing:
        return (directory_check(directory),)
    return checks_named(directory, names, disabled, logs)


def checks_named(
    directory: str, names: Iterable[str], disabled: tuple[str, ...], logs: Path | None
) -> tuple[Check, ...]:
    """Return the checks of the programs that a directory was seen to have."""
    return tuple(_check(Path(directory, name), logs) for name in names if name not in disabled)


def directory_check(
    directory: str, found: Callable[[tuple[str, ...]], object] = lambda names: None
) -> Check:
    """Return the check of the directory itself.

    Args:
        directory: of the programs.
        found: is given their names whenever it could be read.
    """

    lister = ProgramLister(directory)

    def probe(context: CheckContext) -> tuple[str, ...]:
        try:
            names = lister.names()
        except NoListing as reason:
            raise Unjudged(f"checks.directory ({directory}): {reason}") from None
        found(names)
        return names

    def judge(names: tuple[str, ...], context: CheckContext) -> Judgement:
        return Judgement(f"{directory}: {', '.join(names) or 'no executable'}")

    return Check(DIRECTORY, probe, judge)


def with_programs(checks: Iterable[Check], own: tuple[Check, ...]) -> tuple[Check, ...]:
    """Return checks and a site's own; one of these replaces a check of the same name."""
    names = {check.name for check in own}
    return (*(check for check in checks if check.name not in names), *own)


def _check(program: Path, logs: Path | None) -> Check:
    own_log = ProgramLog(logs / f"{program.name}.log") if logs else None

    def probe(context: CheckContext) -> ProgramEnd:
        try:
            fault = untrusted(program)
        except OSError as error:
            raise Unjudged(f"{error.filename} cannot be looked at: {error.strerror}") from None
        if fault:
            raise Unjudged(fault)
        end = run_program(program, TIMEOUT_SECONDS)
        if own_log is not None:
            own_log.note(end, context.now)
        return end

    def judge(seen: ProgramEnd, context: CheckContext) -> Judgement:
        return judge_end(program.name, seen, context.now)

    return Check(program.name, probe, judge, timeout=TIMEOUT_SECONDS + KILL_SECONDS)


def run_program(program: Path, seconds: float) -> ProgramEnd:
    """Run a program to its end, in an environment of its own.

    Args:
        program: it is given no arguments.
        seconds: time limit.

    Raises:
        Unjudged: it cannot be started; or it did not end within that, and was killed.
    """
    output, errors = _bounded_file(), _bounded_file()
    try:
        child = _start(program, output, errors)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            # One that cannot be killed keeps this thread, and is not started again meanwhile.
            child.wait()
            raise Unjudged(f"no end within {seconds:g} s; it was killed") from None
        # What it left behind would grow by a process a run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        text, more = _content(output), _content(errors)
    finally:
        os.close(output)
        os.close(errors)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    both = f"{text.rstrip()}\n{more}" if text.strip() else more
    return ProgramEnd(code, lines[0][:MAX_LINE_CHARACTERS] if lines else "", both)


def _start(program: Path, output: int, errors: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [str(program)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        # The kernel says of a script without its interpreter that the script is not there.
        hint = "; does its first line name a program that is there (#!/bin/sh)?"
        text = f"{program} cannot be started: {error.strerror}"
        raise Unjudged(text + (hint if program.exists() else "")) from None


def _content(file: int) -> str:
    return os.pread(file, MAX_OUTPUT_BYTES, 0).partition(b"\0")[0].decode("utf-8", "replace")


def _bounded_file() -> int:
    """Return a file in memory that cannot grow: to a program that prints on, writing fails."""
    output = os.memfd_create("check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(output, MAX_OUTPUT_BYTES)
    fcntl.fcntl(output, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return output


def judge_end(name: str, seen: ProgramEnd, now: float) -> Judgement:
    """Return the judgement on a program's end.

    Raises:
        Unjudged: the program says that it cannot tell, or did not end by itself.
    """
    if seen.code == WELL:
        return Judgement(seen.line or "well")
    if seen.code not in (WATCH, FAULT):
        said = f": {seen.line}" if seen.line else ""
        end = f"ended with {seen.code}" if seen.code >= 0 else f"was ended by signal {-seen.code}"
        raise Unjudged(f"{name} {end}{said}")
    if seen.code == FAULT and not seen.line:
        # A shell ends so that cannot read its script, and ls and grep where a file is missing: no
        # mistake in a script may reboot the nodes that have it.
        raise Unjudged(f"{name} ended with {FAULT} and said nothing: a fault is a line on stdout")
    word, colon, rest = seen.line.partition(":")
    named = next((s for s in FAULTY if colon and word.strip().lower() == s), None)
    severity = Severity.MONITOR if seen.code == WATCH else named or Severity.REBOOT
    text = (rest.strip() if named else seen.line) or f"{name} ended with {seen.code}"
    finding = Finding(name, severity, text, now, evidence=seen.line)
    return Judgement(text, (finding,))
