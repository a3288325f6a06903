"""End a child process and what it has started, where that may hang in the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any


def end_group(child: subprocess.Popen[Any], seconds: float) -> bool:
    """Kill a child that leads a process group of its own, the group with it, and close its pipes.

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
