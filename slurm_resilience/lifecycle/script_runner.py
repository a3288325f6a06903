"""Run one script: in a session of its own, within its time, with its output in a bounded file."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from slurm_resilience.clock import Clock
from slurm_resilience.lifecycle.run_record import CANNOT_RUN, TIMED_OUT, ScriptResult
from slurm_resilience.lifecycle.script_set import LifecycleScript

MAX_LOG_BYTES = 1 << 20
"""Bytes of a script's log: its beginning and its end; one older log is kept."""
ROOM_BYTES = 4 * MAX_LOG_BYTES
"""Free on the disk of the logs; with less, a script prints into memory."""
LOOK_SECONDS = 0.5
"""Between two looks at the size of the log."""
KILL_SECONDS = 10.0
"""Until a killed script is waited for no more."""
_LINE_CHARACTERS = 200
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_LEFT_OUT = b"\n== the middle of the output is left out ==\n"


def run_script(
    script: LifecycleScript,
    node: str,
    seconds: float,
    log: Path,
    environment: Mapping[str, str],
    clock: Clock,
) -> ScriptResult:
    """Run a script to its end.

    Args:
        script: of the set.
        node: the node's name in Slurm.
        seconds: time limit; what it started in the background and left in its session goes too.
        log: where its output goes; the one of its last run is kept beside it.
        environment: of the script.
        clock: of this machine.
    """
    if not (script.is_executable or script.runs_once):
        return ScriptResult(script.name, None, 0.0, "it is not executable", script.digest)
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(f"{log.name}.1"))
    began = clock.monotonic()
    output, is_kept = _open_output(log)
    try:
        rc = _end_of(script, node, seconds, output, environment, clock)
        _bound(output)
        text = _last_line(output)
        if not is_kept:
            with contextlib.suppress(OSError):
                log.write_bytes(os.pread(output, MAX_LOG_BYTES, 0))
    finally:
        os.close(output)
    took = round(clock.monotonic() - began, 3)
    return ScriptResult(script.name, rc, took, text, script.digest, at=clock.now())


def _open_output(log: Path) -> tuple[int, bool]:
    """Open a script's log, or memory in its place where the disk has no room for it: a script must
    not fail because it prints. Return whether it is the log."""
    with contextlib.suppress(OSError):
        output = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        room = os.fstatvfs(output)
        if room.f_bfree * room.f_frsize >= ROOM_BYTES:
            return output, True
        os.close(output)
    output = os.memfd_create(log.name, os.MFD_CLOEXEC)
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    return output, False


def _end_of(
    script: LifecycleScript,
    node: str,
    seconds: float,
    output: int,
    environment: Mapping[str, str],
    clock: Clock,
) -> int:
    try:
        process = subprocess.Popen(
            script.argv(node),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            cwd=script.working_directory,
            start_new_session=True,
            # Where this process is killed, the next run would start a second one beside it.
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        os.write(output, f"{script.name}: cannot be run: {error.strerror}\n".encode())
        return CANNOT_RUN
    deadline = clock.monotonic() + seconds
    while True:
        left = deadline - clock.monotonic()
        try:
            code = process.wait(max(0.0, min(left, LOOK_SECONDS)))
        except subprocess.TimeoutExpired:
            _bound(output)
            if left > 0:
                continue
            os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                # In the kernel, on a dead file server, say: the boot must not hang with it.
                os.write(output, b"it cannot be killed: it hangs in the kernel\n")
            return TIMED_OUT
        return code if code >= 0 else 128 - code


def die_with_parent() -> None:
    """In a child: KILL when the thread that started it ends. What it starts itself lives on."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _bound(output: int) -> None:
    """Take the middle out of a log that has grown too long. What the script writes goes behind the
    end, wherever that is: the file is open for appending."""
    size = os.fstat(output).st_size
    if size <= MAX_LOG_BYTES:
        return
    tail = os.pread(output, MAX_LOG_BYTES // 4, size - MAX_LOG_BYTES // 4)
    os.ftruncate(output, MAX_LOG_BYTES // 4)
    os.write(output, _LEFT_OUT + tail)


def _last_line(output: int) -> str:
    size = os.fstat(output).st_size
    tail = os.pread(output, 4096, max(0, size - 4096)).decode("utf-8", "replace")
    lines = [" ".join(line.split()) for line in tail.splitlines() if line.strip()]
    last = lines[-1][:_LINE_CHARACTERS] if lines else ""
    return "".join(char if char.isprintable() else "?" for char in last)
