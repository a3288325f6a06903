"""Run one replacement program, and leave its output and exit code in files.

sresctld may be restarted (or killed) while a replacement of half an hour runs. So the program is
a child of this runner, in a session of its own: its output goes to ``output``, and its exit code
to ``rc`` when it has ended. It inherits the lock of its run, and so does the program: as long as
one of them lives the run is under way. Its command line:
``python -m slurm_resilience.replace.program_runner DIR SECONDS LOCK -- PROGRAM ARG...``
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.replace.program import (
    NEVER_BEGAN_RC,
    OUTPUT,
    RESULT,
    RUNNER,
    write_in_place,
)

TIMEOUT_RC = 124
STOP_SECONDS = 60.0
"""For a program that a person stops to leave its work in order, until it is killed: the node that
it has in hand may be in service again."""
SIZE_CHECK_SECONDS = 1.0
"""Between two looks at the size of the output."""
RESULT_AGAIN_SECONDS, MAX_TRIES_WITHOUT_DIRECTORY = 5.0, 720
"""A disk that cannot take the exit code (it is full, or was mounted read-only) is tried again for
as long as that lasts: until then the run counts as under way, and no other one is started. Where
the state directory is gone, an hour is given to bring it back."""
MAX_OUTPUT_BYTES, KEPT_OUTPUT_BYTES = 64 << 20, 1 << 20
"""An output longer than the first is cut to its last bytes."""
OOM_SCORE_ADJUST = 500
"""Has the kernel end the program where memory runs out, not its runner, sresctld or slurmctld
beside it: theirs is 0 or less (proc_pid_oom_score_adj(5))."""
MAX_MORE_TASKS = 512
"""A program may add so many processes and threads to those of its user: eight programs that run
away leave room in the unit's TasksMax."""


def run(directory: Path, seconds: float, argv: list[str], lock: int) -> int:
    """Run ``argv`` with a time limit; return its exit code.

    124 stands for too long, `NEVER_BEGAN_RC` for a program that cannot be started.
    """
    program: subprocess.Popen[bytes] | None = None
    stopped_at = math.inf

    def pass_on(signum: int, _: object) -> None:
        nonlocal stopped_at
        stopped_at = min(stopped_at, SYSTEM_CLOCK.monotonic())
        if program is not None:
            _kill(program, signum)

    # Before the program exists: a runner that is ended alone would leave it without a time limit.
    signal.signal(signal.SIGTERM, pass_on)
    try:
        output = (directory / OUTPUT).open("ab")
    except OSError:
        return NEVER_BEGAN_RC
    with output:
        try:
            program = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
                preexec_fn=_bound,  # safe: the runner has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            _say(output, f"cannot be started: {error}{_hint(error, argv[0])}")
            return NEVER_BEGAN_RC
        if stopped_at < math.inf:
            _kill(program, signal.SIGTERM)
        until = SYSTEM_CLOCK.monotonic() + seconds
        try:
            return _wait(program, lambda: min(until, stopped_at + STOP_SECONDS), directory / OUTPUT)
        except subprocess.TimeoutExpired:
            if stopped_at < math.inf:
                _say(output, "killed: it was stopped, and went on after SIGTERM")
                _kill(program, signal.SIGKILL)
                return program.wait()
            _say(output, f"ended: it ran longer than {seconds:g} s")
            _kill(program, signal.SIGTERM)
            try:
                program.wait(timeout=10)
            except subprocess.TimeoutExpired:
                _kill(program, signal.SIGKILL)
                program.wait()
            return TIMEOUT_RC


def _hint(error: Exception, program: str) -> str:
    """Return what the kernel's word for a missing interpreter hides: that of a missing file."""
    is_there = isinstance(error, FileNotFoundError) and Path(program).exists()
    return " (it is there; its first line names an interpreter that is not)" if is_there else ""


def _bound() -> None:
    """Bound what this process, and all that it starts, may take from its neighbours.

    Root has no bound on its processes: the kernel sets none.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(f"{OOM_SCORE_ADJUST}")
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _tasks_of(os.getuid()) + MAX_MORE_TASKS
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _tasks_of(user: int) -> int:
    """Count a user's processes and threads, as RLIMIT_NPROC does (getrlimit(2))."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                count += sum(1 for _ in (process / "task").iterdir())
    return count


def _wait(program: subprocess.Popen[bytes], deadline: Callable[[], float], output: Path) -> int:
    """Wait for its end, and keep what it prints from filling the disk.

    Args:
        program: it runs.
        deadline: returns the moment by which it has to end, on the monotonic clock.
        output: its file.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then.
    """
    while True:
        remaining = deadline() - SYSTEM_CLOCK.monotonic()
        try:
            return program.wait(timeout=max(0.0, min(SIZE_CHECK_SECONDS, remaining)))
        except subprocess.TimeoutExpired:
            if remaining <= SIZE_CHECK_SECONDS:
                raise
        finally:
            _shorten(output)


def _shorten(output: Path) -> None:
    """Keep only the end of a very long output. All its writers append to it, so it may be cut."""
    with contextlib.suppress(OSError), output.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size > MAX_OUTPUT_BYTES:
            file.seek(size - KEPT_OUTPUT_BYTES)
            kept = file.read(KEPT_OUTPUT_BYTES)
            file.truncate(0)
            file.seek(0)
            file.write(b"[only the end of a long output was kept]\n" + kept)


def _kill(program: subprocess.Popen[bytes], signum: int) -> None:
    try:
        os.killpg(program.pid, signum)
    except ProcessLookupError:
        return


def _say(output: IO[bytes], text: str) -> None:
    """Add a line of the runner's own to the output. A full disk loses it."""
    with contextlib.suppress(OSError):
        os.write(output.fileno(), f"{text}\n".encode())


def _leave_result(path: Path, code: int) -> None:
    """Write down the exit code, as soon as the disk takes it."""
    never, without_directory = threading.Event(), 0
    while without_directory < MAX_TRIES_WITHOUT_DIRECTORY:
        try:
            write_in_place(path, f"{code}")
            return
        except FileNotFoundError:
            without_directory += 1
            with contextlib.suppress(OSError):
                _make_again(path.parent)
                continue
        except OSError:
            without_directory = 0
        SYSTEM_CLOCK.wait(never, RESULT_AGAIN_SECONDS)


def _make_again(directory: Path) -> None:
    """Make a run's directory that a person has removed, alone or with that of all runs.

    Raises:
        OSError: the whole file system is away: then nothing is left beside the runs either.
    """
    runs = directory.parent
    if any(runs.parent.iterdir()):
        runs.mkdir(exist_ok=True)
    directory.mkdir()


def main() -> int:
    directory, lock = Path(sys.argv[1]), int(sys.argv[3])
    try:
        write_in_place(directory / RUNNER, f"{os.getpid()}")
    except OSError:
        # Without it a run counts as one that has begun nothing: so nothing is begun.
        return 0
    code = run(directory, float(sys.argv[2]), sys.argv[5:], lock)
    # As a shell says it: 128 and the signal.
    _leave_result(directory / RESULT, code if code >= 0 else 128 - code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
