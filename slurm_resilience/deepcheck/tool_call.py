"""Run tools on a node: found on PATH, with a time limit, and killed with their children."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import IO, NamedTuple

import msgspec

from slurm_resilience.health.check import Unjudged

MAX_OUTPUT_BYTES = 8 << 20
END_SIGNAL = signal.SIGUSR1
"""srun hands it on to its tasks, while its own end kills them outright."""
_ENDING = (END_SIGNAL, signal.SIGTERM, signal.SIGHUP)
KILL_GRACE_SECONDS = 5.0
"""Seconds for a killed tool to end; one that hangs in the kernel does not."""


class ToolOutput(NamedTuple):
    """The outcome of a tool that ended by itself."""

    code: int
    out: str
    err: str

    @property
    def both(self) -> str:
        """Both streams, one after the other."""
        return f"{self.out.rstrip()}\n{self.err}" if self.out.strip() else self.err


class RunningTool:
    """A tool that runs beside its caller."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it.

        Raises:
            Unjudged: it is not installed, or cannot be started.
        """
        self.name = PurePath(argv[0]).name
        path = shutil.which(argv[0])
        if path is None:
            raise Unjudged(f"{argv[0]} is not installed")
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as it runs
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # the same
        try:
            self._process = subprocess.Popen(
                [path, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                env={**os.environ, **(environment or {}), "LC_ALL": "C"},
                cwd="/",  # as in a step: a user's directory may have files that a tool takes in
                start_new_session=True,
            )
        except OSError as error:
            raise Unjudged(f"{self.name} cannot be started: {error.strerror}") from None

    def end(self, timeout_seconds: float) -> ToolOutput:
        """Wait for its end; an exception in between, such as that of a signal, kills it.

        Raises:
            Unjudged: it did not end in time, and was killed.
        """
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Unjudged(
                f"{self.name} did not end within {timeout_seconds:g} s and was killed"
            ) from None
        except BaseException:
            self.kill()
            raise
        return ToolOutput(code, _text(self._out), _text(self._err))

    def kill(self) -> None:
        """End it and its children; it may have ended already."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILL_GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            return


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within a `with`, let SIGTERM and the like end this program as an exception does: its tools
    are killed, its files removed. A second one does not cut that short."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    # nohup's choice stays.
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def run_tool(argv: Sequence[str], timeout_seconds: float) -> ToolOutput:
    """Run a tool to its end; raises what `RunningTool` raises."""
    return RunningTool(argv).end(timeout_seconds)


def start_program(
    module: str, request: msgspec.Struct, environment: Mapping[str, str] | None = None
) -> RunningTool:
    """Start a module of this package with an order, by this Python."""
    words = [sys.executable, "-P", "-m", module, msgspec.json.encode(request).decode("utf-8")]
    return RunningTool(words, environment)
