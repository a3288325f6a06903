"""Write the stacks of all threads of this process to a file when training hangs."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""A file that is larger is begun anew."""

FRAMES = 5
"""Innermost frames that are told in one line."""


def innermost(thread: int) -> str:
    """Return the place in the program of a thread of this process, in one line.

    Args:
        thread: its ``ident``.

    Returns:
        ``file:line function`` of its innermost frames, the innermost first.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "a thread that is gone"
    found = traceback.extract_stack(frame, limit=FRAMES)[::-1]
    return " < ".join(f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in found)


def dump(path: str | os.PathLike[str], name: str, reason: str = "") -> bool:
    """Append the Python stacks of all threads to a file. Never raises: a hang is bad enough.

    Works while the main thread is blocked in C, e.g. in a collective: it runs in the thread that
    calls it, and does not need the others to answer.

    Args:
        path: the file; its directory is made.
        name: who this is, e.g. ``rank 3 (seat 3, n7)``.
        reason: why it is written.

    Returns:
        Whether it was written.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        big = file.exists() and file.stat().st_size > MAX_BYTES
        with file.open("w" if big else "a", encoding="utf-8") as stream:
            at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            stream.write(f"\n==== {at} {name}, process {os.getpid()}: {reason}\n")
            for thread in threading.enumerate():
                stream.write(f"thread 0x{thread.ident or 0:016x} is {thread.name}\n")
            stream.flush()  # the stacks go around Python's buffer
            faulthandler.dump_traceback(stream, all_threads=True)
    except (OSError, ValueError) as error:
        log.warning("stacks of %s cannot be written to %s: %s", name, file, error)
        return False
    log.warning("stacks of %s are in %s", name, file)
    return True
