"""Warn of each thing a single time, from any thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("sres.data")

WarnOnce = Callable[[str], None]


def warn_once() -> WarnOnce:
    """Return a function that logs each text a single time."""
    said: set[str] = set()
    lock = threading.Lock()

    def warn(text: str) -> None:
        with lock:  # the reader's thread and the training's may meet the same thing at once
            new = text not in said
            said.add(text)
        if new:
            log.warning("%s", text)

    return warn
