"""The ranks' output: left alone, written to files, shown with a prefix, or both."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from slurm_resilience.launcher.flags import STDERR, STDOUT

_NAMES = {STDOUT: "stdout.log", STDERR: "stderr.log"}
_TAIL_BYTES = 8192
_LONGEST_LINE = 65536
_READS = 16
"""Reads of a stream before the launcher looks at anything else. A pipe holds no more than that."""


class Streams(msgspec.Struct, frozen=True):
    """The targets of one local rank's output (bits: STDOUT, STDERR)."""

    redirect: int = 0
    """Into files, not shown."""
    tee: int = 0
    """Into files, and shown with a prefix."""
    shown: bool = True
    """False: filtered out (--local-ranks-filter)."""

    def file(self, bit: int, directory: Path | None) -> Path | None:
        """Return the file that takes this stream; None: none does."""
        if directory is not None and (self.redirect | self.tee) & bit:
            return directory / _NAMES[bit]
        return None if self.shown else Path(os.devnull)

    def teed(self, bit: int) -> bool:
        return bool(self.tee & bit) and self.shown


class Sink:
    """Takes one stream of one process from a pipe.

    Args:
        fd: read end; it is made non-blocking.
        bit: STDOUT or STDERR.
    """

    def __init__(self, fd: int, bit: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._console = sys.stdout if bit == STDOUT else sys.stderr
        self._bit = bit
        self._prefix: bytes | None = None
        self._file: int | None = None
        self._line = b""

    def point(self, streams: Streams, directory: Path | None, prefix: str) -> None:
        """Its process has become a rank: from now on the output is that rank's."""
        if streams.teed(self._bit):
            self._prefix = prefix.encode()
            path = streams.file(self._bit, directory)
            if path is not None:
                with suppress(OSError):  # a full disk must not end a training; neither below
                    self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def pump(self) -> bool:
        """Move what is there, and no more than a pipe holds: a program that writes all the time
        would keep the launcher from its signals. Does not wait. Returns False at the end of the
        stream."""
        for _ in range(_READS):
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            if self._file is not None:
                with suppress(OSError):
                    _write(self._file, data)
            self._show(data)
        return True

    def close(self) -> None:
        """Show what is left of a last line, and close the file."""
        if self._line:
            self._show(b"\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _show(self, data: bytes) -> None:
        # Our output is not read any more; without an open one there is no stream.
        with suppress(ValueError, OSError, AttributeError):
            if self._prefix is None:
                _write(self._console.fileno(), data)
                return
            *lines, self._line = (self._line + data).split(b"\n")
            if len(self._line) > _LONGEST_LINE:
                lines, self._line = [*lines, self._line], b""
            if lines:
                text = b"".join(self._prefix + line + b"\n" for line in lines)
                _write(self._console.fileno(), text)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def tail(file: Path | None, lines: int = 20) -> list[str]:
    """Return the last lines of a file; none if it cannot be read."""
    if file is None:
        return []
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
