"""Run one replacement program, and leave its output and exit code in files.

sresctld may be restarted (or killed) while a replacement of half an hour runs. So the program is
a child of this runner, in a session of its own: its output goes to ``output``, and its exit code to
``rc`` when it has ended. Its command line:
``python -m slurm_resilience.replace.program_runner DIR SECONDS -- PROGRAM ARG...``
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.replace.program import note_runner

TIMEOUT_RC = 124
CANNOT_START_RC = 127
SIZE_CHECK_SECONDS = 1.0
"""Between two looks at the size of the output."""
MAX_OUTPUT_BYTES, KEPT_OUTPUT_BYTES = 64 << 20, 1 << 20
"""An output longer than the first is cut to its last bytes."""


def run(directory: Path, seconds: float, argv: list[str]) -> int:
    """Run ``argv`` with a time limit; return its exit code.

    124 stands for too long, 127 for a program that cannot be started.
    """
    with (directory / "output").open("ab") as output:
        try:
            program = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"cannot be started: {error}\n".encode())
            return CANNOT_START_RC
        _write_whole(directory / "program", f"{program.pid}\n")

        def pass_on(signum: int, _: object) -> None:
            _kill(program, signum)

        signal.signal(signal.SIGTERM, pass_on)
        try:
            return _wait(program, seconds, directory / "output")
        except subprocess.TimeoutExpired:
            output.write(f"ended: it ran longer than {seconds:g} s\n".encode())
            _kill(program, signal.SIGTERM)
            try:
                program.wait(timeout=10)
            except subprocess.TimeoutExpired:
                _kill(program, signal.SIGKILL)
                program.wait()
            return TIMEOUT_RC


def _wait(program: subprocess.Popen[bytes], seconds: float, output: Path) -> int:
    """Wait for its end, and keep what it prints from filling the disk.

    Raises:
        subprocess.TimeoutExpired: it has not ended within ``seconds``.
    """
    deadline = SYSTEM_CLOCK.monotonic() + seconds
    while True:
        remaining = deadline - SYSTEM_CLOCK.monotonic()
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


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def main() -> int:
    directory = Path(sys.argv[1])
    note_runner(directory, os.getpid())
    code = run(directory, float(sys.argv[2]), sys.argv[4:])
    _write_whole(directory / "rc", f"{code}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
