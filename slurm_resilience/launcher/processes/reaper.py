"""A child that cleans up behind a launcher that was killed: its ranks' groups and its directory.

The kernel ends the ranks with the launcher (PR_SET_PDEATHSIG), but not what they had started, and
no other process would remove the private directory, which lies in memory.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path


class Reaper:
    """Start it before anything else: it is a fork of this process.

    Args:
        directory: removed after the launcher's death.
    """

    def __init__(self, directory: Path) -> None:
        ear, self._mouth = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._mouth)
                _watch(ear, directory)
            finally:
                os._exit(0)
        os.close(ear)

    @property
    def pid(self) -> int:
        return self._pid

    def mind(self, group: int) -> None:
        """Kill this process group when the launcher dies."""
        self._say(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """Call it before the group's leader is reaped: later its number may be another's."""
        self._say(b"-%d\n" % group)

    def close(self) -> None:
        """Tell the reaper that the launcher ends now: it cleans up what is left."""
        os.close(self._mouth)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _say(self, word: bytes) -> None:
        with suppress(BrokenPipeError):  # the reaper was killed: the kernel still does its part
            os.write(self._mouth, word)


def _watch(ear: int, directory: Path) -> None:
    os.setsid()
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    groups: set[int] = set()
    with os.fdopen(ear, "rb") as words:
        for word in words:
            (groups.add if word.startswith(b"+") else groups.discard)(int(word[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
