"""A site's own checks: every executable in a directory is one.

A program ends with 0 (well), 1 (worth watching) or 2 (a fault); anything else is unjudged, as for
Nagios. The first line that it prints is the finding's text; a fault asks for a reboot, unless that
line begins with another action and a colon: `replace: the fan is dead`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import FAULTY, Finding, Severity

log = logging.getLogger("sresd.checks")

TIMEOUT_SECONDS = 60.0
KILL_SECONDS = 2.0
"""Seconds beyond the time limit in which a killed program has to end."""
MAX_OUTPUT_BYTES = 1 << 16
MAX_LINE_CHARACTERS = 400
WELL, WATCH, FAULT = 0, 1, 2
"""Exit codes."""
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C"}


class ProgramEnd(NamedTuple):
    """The end of a program, and the first line that it printed."""

    code: int
    line: str


def program_checks(directory: str, disabled: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """Return a check for each executable in a directory; none where it is empty or not there."""
    if not directory:
        return ()
    try:
        files = sorted(Path(directory).iterdir())
    except OSError as error:
        log.warning("checks.directory: %s cannot be read: %s", directory, error.strerror)
        return ()
    programs = [f for f in files if not f.name.startswith(".") and os.access(f, os.X_OK)]
    return tuple(
        _check(program)
        for program in programs
        if program.is_file() and program.name not in disabled
    )


def with_programs(
    checks: tuple[Check, ...], directory: str, disabled: tuple[str, ...]
) -> tuple[Check, ...]:
    """Return checks and a site's programs; a program replaces a check of the same name."""
    own = program_checks(directory, disabled)
    names = {check.name for check in own}
    return (*(check for check in checks if check.name not in names), *own)


def _check(program: Path) -> Check:
    def probe(context: CheckContext) -> ProgramEnd:
        try:
            fault = unsafe(program)
        except OSError as error:
            raise Unjudged(f"{error.filename} cannot be looked at: {error.strerror}") from None
        if fault:
            raise Unjudged(fault)
        return run_program(program, TIMEOUT_SECONDS)

    def judge(seen: ProgramEnd, context: CheckContext) -> Judgement:
        return judge_end(program.name, seen, context.now)

    return Check(program.name, probe, judge, timeout=TIMEOUT_SECONDS + KILL_SECONDS)


def unsafe(program: Path) -> str:
    """Return why a program may not be run, or a file not be believed: another user could have
    written it, or put another one in its place. A link counts as what it leads to.

    Raises:
        OSError: it is not there, or cannot be looked at.
    """
    target = program.resolve(strict=True)
    for path in dict.fromkeys((program, program.parent, target, target.parent)):
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}, not to root"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} may be written by others than its owner: chmod go-w"
    for path in dict.fromkeys((*program.absolute().parents, *target.parents)):
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}, not to root"
        if status.st_mode & stat.S_IWOTH and not _is_sticky(status):
            return f"{path} may be written by everyone: chmod o-w"
    return ""


def _is_sticky(status: os.stat_result) -> bool:
    """Tell whether a directory is like /tmp: no user replaces what belongs to another."""
    return stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


def run_program(program: Path, seconds: float) -> ProgramEnd:
    """Run a program to its end, in an environment of its own.

    Args:
        program: it is given no arguments.
        seconds: time limit.

    Raises:
        Unjudged: it did not end within that, and was killed.
    """
    output = _bounded_file()
    try:
        child = subprocess.Popen(
            [str(program)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            # One that cannot be killed keeps this thread, and is not started again meanwhile.
            child.wait()
            raise Unjudged(f"no end within {seconds:g} s; it was killed") from None
        text = os.pread(output, MAX_OUTPUT_BYTES, 0).partition(b"\0")[0].decode("utf-8", "replace")
    finally:
        os.close(output)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ProgramEnd(code, lines[0][:MAX_LINE_CHARACTERS] if lines else "")


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
        raise Unjudged(f"{name} ended with {seen.code}{said}")
    word, colon, rest = seen.line.partition(":")
    named = next((s for s in FAULTY if colon and word.strip().lower() == s), None)
    severity = Severity.MONITOR if seen.code == WATCH else named or Severity.REBOOT
    text = (rest.strip() if named else seen.line) or f"{name} ended with {seen.code}"
    finding = Finding(name, severity, text, now, evidence=seen.line)
    return Judgement(text, (finding,))
