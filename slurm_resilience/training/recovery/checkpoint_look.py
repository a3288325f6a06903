"""Ask which checkpoint is the newest one, of a directory that may hang.

Whenever the world has changed each rank tells the others. One that has the training's state waits
only so long for the directory: later the others take it for stuck, and its process is ended, with
the state, though nothing but a disk was away. It goes on with what it knows. One that has nothing
waits as long as it takes, or a training that has checkpoints would begin from scratch.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from slurm_resilience.clock import SYSTEM_CLOCK

log = logging.getLogger("sres.training")

LOOK_SECONDS = 2.0
"""So long a rank that has the state waits for a look, at most: a directory on a disk that works has
answered by then."""
SHARE_OF_ABORT = 0.25
"""And not more than this part of the abort timeout, in which it must be out of its block."""


class CheckpointLook:
    """Looks for the newest checkpoint, one look at a time.

    Args:
        keeper: the checkpointer.
        abort_timeout: of `resilient`, seconds.
    """

    def __init__(self, keeper: Any, abort_timeout: float) -> None:
        self._keeper = keeper
        self._limit = min(LOOK_SECONDS, SHARE_OF_ABORT * abort_timeout)
        self._known = -1
        self._thread: threading.Thread | None = None
        """The look that is under way, or was the last one."""
        self._until = 0.0
        """When it is not waited for any longer."""
        self._answer: int | BaseException = -1
        self._is_told = False

    def newest(self, *, has_state: bool) -> int:
        """Return the step of the newest checkpoint; -1: there is none.

        Args:
            has_state: this rank has the training's state: it goes on without an answer.

        Raises:
            Exception: whatever the checkpointer raised.
        """
        if not has_state:
            self._known = self._keeper.readable()
            return self._known
        if not self._has_answered():
            if not self._is_told:
                text = "checkpoints: their directory has not answered for %.1f s; goes on without"
                log.warning(text, self._limit)
            self._is_told = True
            # Another checkpointer may not tell what it has saved.
            saved = getattr(getattr(self._keeper, "counts", None), "last", -1)
            return max(self._known, saved)
        self._is_told = False
        if isinstance(self._answer, BaseException):
            raise self._answer
        self._known = self._answer
        return self._known

    def _has_answered(self) -> bool:
        """Look anew, unless a look hangs; tell whether there is an answer in time."""
        now = SYSTEM_CLOCK.monotonic()
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._look, name="sres-disk-look", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give
                self._look()
                return True
            self._thread, self._until = thread, now + self._limit
        self._thread.join(max(0.0, self._until - now))
        return not self._thread.is_alive()

    def _look(self) -> None:
        try:
            self._answer = self._keeper.readable()
        except BaseException as error:  # for the thread that asked
            self._answer = error
