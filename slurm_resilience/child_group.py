"""The end of child processes: with us, or with all that they have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from typing import Any

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM, parent: int = 0) -> None:
    """In a new process, before it becomes another program: have it end when the thread that started
    it does, and block no signal.

    Args:
        number: the signal that it is ended by.
        parent: the process that it was started by; it ends at once where that is gone already.
            0: not looked at.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(1)


def end_group(child: subprocess.Popen[Any], seconds: float) -> bool:
    """Kill a child that leads a process group of its own, the group with it, and close its pipes.

    It may hang in the kernel.

    Args:
        child: started with ``start_new_session``.
        seconds: in which it has to end.

    Returns:
        False: it has not ended. It hangs in the kernel, and no other one should be started for the
        same work while it does.
    """
    if child.poll() is None:  # else its number may be another one's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        has_ended = False
    else:
        has_ended = True
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    return has_ended
