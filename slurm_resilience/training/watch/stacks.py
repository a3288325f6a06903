"""Write the stacks of all threads of this process to a file when training hangs."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
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
            stream.writelines(_stacks())
    except (OSError, ValueError) as error:
        log.warning("stacks of %s cannot be written to %s: %s", name, file, error)
        return False
    log.warning("stacks of %s are in %s", name, file)
    return True


def _stacks() -> Iterator[str]:
    """Write out each thread's calls, the innermost first; the main thread comes first.

    faulthandler ends its list after 100 threads, and comes to the main thread last. No line of
    source is read: the disk may be what hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    for ident in sorted(frames, key=lambda one: (one != main, one)):
        yield f"thread 0x{ident:016x} is {names.get(ident, 'not of Python')}\n"
        for frame, line in traceback.walk_stack(frames[ident]):
            yield f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n'
