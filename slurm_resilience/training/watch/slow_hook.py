"""See a hook of the training's own that takes long, before the block: no step is under way then, so
no rank is judged, and all wait for it without a word. Pure, but for what it keeps."""

from __future__ import annotations

TELL_SECONDS = 20.0
"""Seconds after which it is told; again after twice as long."""
MOST_SECONDS = 600.0
"""Seconds after which it hangs."""


class SlowHook:
    """The one that runs, if there is one. One thread runs it, another one looks."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._tell = TELL_SECONDS

    def begin(self, now: float) -> None:
        """Note that it is called."""
        self._tell, self._begun = TELL_SECONDS, now

    def end(self) -> None:
        """Note that it is done, or left."""
        self._begun = None

    def seconds(self, now: float) -> float:
        """Return how long it has run; 0: none runs."""
        begun = self._begun
        return 0.0 if begun is None else now - begun

    def is_to_be_told(self, now: float) -> bool:
        """Tell whether people are to hear of it now."""
        if self.seconds(now) < self._tell:
            return False
        self._tell *= 2
        return True
