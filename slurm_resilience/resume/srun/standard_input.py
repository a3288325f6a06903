"""Give every attempt the same standard input from its beginning.

A file is read again from where it stood. What comes through a pipe is gone once it was read, so it
is kept as it passes, up to a limit. A terminal and other devices are srun's own, as ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from collections.abc import Iterator
from enum import Enum
from typing import IO

from slurm_resilience.resume import report
from slurm_resilience.resume.srun.srun_options import SrunCommand

_READ_BYTES = 65536
STOP_SECONDS = 1.0
"""For a pump to stop. It may be held up where another process reads the same pipe."""


class InputKind(Enum):
    """The sources of an attempt's standard input."""

    INHERITED = "srun gets the supervisor's own"
    FILE = "the same file, from where it stood"
    PIPE = "what was kept of it, then what still comes"


def reads_input(command: SrunCommand, stdin_mode: str) -> bool:
    """Return whether srun reads its own standard input: not for ``--input=none`` or a file.

    Args:
        command: the user's.
        stdin_mode: ``$SLURM_STDINMODE``, which holds where there is no such option.
    """
    chosen = command.value("input") or stdin_mode or "all"
    return not command.has("pty") and (chosen == "all" or chosen.isdecimal())


def kind_of(number: int) -> InputKind:
    """Return how an open file can be given to several attempts."""
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISREG(mode):
            os.lseek(number, 0, os.SEEK_CUR)
            return InputKind.FILE
    except OSError:
        return InputKind.INHERITED
    return InputKind.PIPE if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else InputKind.INHERITED


class StandardInput:
    """The standard input of one supervised srun."""

    def __init__(self, limit_bytes: int, *, is_read: bool, source: int = 0) -> None:
        """
        Args:
            limit_bytes: of a pipe's input, more than this is not kept.
            is_read: srun reads it.
            source: the open file; its owner keeps it open.
        """
        self._limit_bytes = limit_bytes
        self._source = source
        self._kind = kind_of(source) if is_read else InputKind.INHERITED
        self._start = os.lseek(source, 0, os.SEEK_CUR) if self._kind is InputKind.FILE else 0
        self._kept: IO[bytes] | None = None
        self._kept_bytes = 0
        self._over = False
        """The pipe's other end is closed."""
        self.lost = ""
        """The reason for which no further attempt can get the same input; empty: it can."""
        self._pump: threading.Thread | None = None
        self._stop = (-1, -1)

    @property
    def is_kept(self) -> bool:
        """Return whether there is something to be read, which is given to each attempt anew."""
        return self._kind is not InputKind.INHERITED

    @contextlib.contextmanager
    def attempt(self) -> Iterator[int | None]:
        """Give the file for the next srun, to be handed over within the block; None: our own."""
        if self._kind is InputKind.FILE:
            os.lseek(self._source, self._start, os.SEEK_SET)
        if self._kind is not InputKind.PIPE:
            yield None
            return
        self.close()
        given, sink = os.pipe()
        os.set_blocking(sink, False)
        try:
            yield given
        except BaseException:
            os.close(sink)
            raise
        finally:
            os.close(given)
        self._stop = os.pipe()
        self._pump = threading.Thread(
            target=self._feed, args=(sink, self._stop[0]), name="stdin", daemon=True
        )
        self._pump.start()

    def close(self) -> None:
        """Give the last srun nothing more."""
        if self._pump is not None:
            os.close(self._stop[1])
            self._pump.join(STOP_SECONDS)
            if not self._pump.is_alive():
                os.close(self._stop[0])
            self._pump = None

    def _feed(self, sink: int, stop: int) -> None:
        """Give one srun what was kept, then what comes, until either end of it is closed."""
        position, pending = 0, memoryview(b"")
        with contextlib.suppress(OSError):  # srun has ended, or has closed its input
            while True:
                if not pending:
                    pending = memoryview(self._read_kept(position))
                    position += len(pending)
                if not pending and self._over:
                    break
                poll = select.poll()
                poll.register(stop, select.POLLIN)
                poll.register(sink, select.POLLOUT if pending else 0)
                if not pending:
                    poll.register(self._source, select.POLLIN)
                ready = dict(poll.poll())
                if stop in ready or ready.get(sink, 0) & select.POLLERR:
                    break
                if pending:
                    pending = pending[os.write(sink, pending) :]
                elif self._source in ready:
                    fresh = self._read_source()
                    self._keep(fresh)
                    pending = memoryview(fresh)
                    position += len(pending)
        os.close(sink)

    def _read_source(self) -> bytes:
        try:
            fresh = os.read(self._source, _READ_BYTES)
        except BlockingIOError:
            return b""  # another process reads this pipe too, and was faster
        except OSError:
            fresh = b""
        self._over = not fresh
        return fresh

    def _read_kept(self, position: int) -> bytes:
        if self._kept is None or position >= self._kept_bytes:
            return b""
        return os.pread(self._kept.fileno(), _READ_BYTES, position)

    def _keep(self, fresh: bytes) -> None:
        if self.lost or not fresh:
            return
        if self._kept_bytes + len(fresh) > self._limit_bytes:
            self._lose(f"is longer than {self._limit_bytes} bytes (resume.stdin_limit_bytes)")
            return
        import tempfile  # late: few steps read a pipe

        try:
            if self._kept is None:
                self._kept = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as we run)
            self._kept.seek(self._kept_bytes)
            self._kept.write(fresh)
            self._kept.flush()
        except OSError as error:
            # Asked for its name where there is none, `tempfile` fails again.
            self._lose(f"could not be kept in {tempfile.tempdir or 'any directory'} ({error})")
            return
        self._kept_bytes += len(fresh)

    def _lose(self, why: str) -> None:
        self.lost = f"its standard input {why}"
        report.say(f"{self.lost}: this step cannot be started again any more")
        with contextlib.suppress(OSError):
            if self._kept is not None:
                self._kept.close()
        self._kept = None
