"""The drill of this node: while one is open, lines count that programs write into the kernel log.

It is a span of this boot's time, kept in a file of root's: it ends by itself, also where sresd was
started anew meanwhile, and with the boot. Lines that counted count again when they are read again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import threading
from pathlib import Path

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.lifecycle.identity import NODE_FILES
from slurm_resilience.wire.messages import ChangeDrill, DrillAnswer

log = logging.getLogger("sresd.drill")

MAX_SECONDS = 3600.0
"""The longest drill."""
MAX_FILE_BYTES = 4096


class DrillSpan(msgspec.Struct, frozen=True):
    """The last drill of a boot, in seconds of the monotonic clock, which all processes share."""

    boot_id: str
    began: float
    ends: float


def drill_file() -> Path:
    """Return the place of a node's drill: where a boot leaves nothing."""
    directory = NODE_FILES if NODE_FILES.is_dir() else Path("/run/sresd")
    return directory / "drill.json"


class DrillWindow:
    """Thread safe: sresctld asks in one thread, and the kernel log's lines come in another."""

    def __init__(self, file: Path, boot_id: str, is_always: bool, clock: Clock) -> None:
        """
        Args:
            file: where the last drill is kept.
            boot_id: this boot's.
            is_always: lines of programs count without a drill (agent.accept_injected).
            clock: its monotonic time counts.
        """
        self._file = file
        self._boot_id = boot_id
        self.is_always = is_always
        self._clock = clock
        self._lock = threading.Lock()
        self._span = self._read()

    def covers(self, uptime: float | None = None) -> bool:
        """Tell whether a program's line counts.

        Args:
            uptime: when it was written, in seconds since the boot, where it is read later; None:
                now. (The kernel's stamps run off from the clock by seconds a day, so the moment at
                which a line arrives is the better one.)
        """
        moment = self._clock.monotonic() if uptime is None else uptime
        span = self._span
        return span is not None and span.began <= moment < span.ends

    def change(self, asked: ChangeDrill) -> DrillAnswer:
        """Open or close a drill, or only say how long the present one lasts.

        Raises:
            UsageError: no length that a drill may have.
            SresError: the file cannot be written; nothing has changed.
        """
        with self._lock:
            now = self._clock.monotonic()
            if asked.change == "open":
                if not (math.isfinite(asked.seconds) and 0 < asked.seconds <= MAX_SECONDS):
                    most = f"{MAX_SECONDS / 60:.0f} minutes"
                    raise UsageError(f"a drill lasts at most {most}, and longer than no time")
                # One that is open already goes on: what has counted in it must not be taken back.
                began = self._span.began if self._span is not None and self.covers() else now
                self._keep(DrillSpan(self._boot_id, began, now + asked.seconds))
                log.warning("a drill is open for %.0f s", asked.seconds)
            elif asked.change == "close" and self._span is not None and self.covers():
                self._keep(msgspec.structs.replace(self._span, ends=now))
                log.warning("the drill was closed")
            left = max(0.0, self._span.ends - now) if self._span is not None else 0.0
        return DrillAnswer(left, self.is_always)

    def _keep(self, span: DrillSpan) -> None:
        unfinished = self._file.with_suffix(".new")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)
            how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(unfinished, how, 0o600), "wb") as file:
                file.write(msgspec.json.encode(span))
            unfinished.replace(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise SresError(f"{self._file} cannot be written: {error.strerror}") from None
        self._span = span

    def _read(self) -> DrillSpan | None:
        """Return the last drill of this boot; None: there is none, or the file is not ours."""
        try:
            data = self._content()
            span = msgspec.json.decode(data, type=DrillSpan)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning(
                "the drill in %s does not count, since it cannot be read: %s", self._file, error
            )
            return None
        is_sound = 0 <= span.began <= self._clock.monotonic() and span.ends >= span.began
        if span.boot_id != self._boot_id or not is_sound:
            return None
        # However long it was opened, and opened anew: it never lasts longer from now on.
        return msgspec.structs.replace(
            span, ends=min(span.ends, self._clock.monotonic() + MAX_SECONDS)
        )

    def _content(self) -> bytes:
        file = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(file)
            others_write = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or others_write:
                raise PermissionError(1, "it is not a file of this user's alone")
            return os.read(file, MAX_FILE_BYTES)
        finally:
            os.close(file)
