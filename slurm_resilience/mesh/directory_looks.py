"""Looks at the place where peers meet, taken in a thread of their own: a shared directory may hang.

The mesh's one thread must go on beating meanwhile, or the others take it for hung; and the main
thread must enter the world that they form.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

log = logging.getLogger("sres.mesh")


class DirectoryLooks:
    """Looks that are asked for, and taken one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[Callable[[], None], None] = {}
        """In the order in which they were asked for."""
        self._is_looking = False

    def ask(self, look: Callable[[], None]) -> None:
        """Have a look be taken soon; one that still waits for its turn is taken once."""
        with self._lock:
            self._asked[look] = None
            if not self._is_looking:
                looks = threading.Thread(target=self._take_all, name="sres-look", daemon=True)
                # Where the system has no thread to give, the next one that asks tries again.
                with contextlib.suppress(RuntimeError):
                    looks.start()
                    self._is_looking = True

    def _take_all(self) -> None:
        while True:
            with self._lock:
                look = next(iter(self._asked), None)
                if look is None:
                    self._is_looking = False
                    return
                del self._asked[look]
            try:
                look()
            except Exception:
                log.exception("a look at the rendezvous failed")
