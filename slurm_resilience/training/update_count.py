"""Count batches and updates, to warn of a loop that would not do what it seems to."""

from __future__ import annotations

import logging

from slurm_resilience.training.elastic.microbatch_step import MicrobatchStep

log = logging.getLogger("sres.training")

MANY_BATCHES = 100
"""After so many without an update one was forgotten."""


class UpdateCount:
    """Counts over all worlds of one process; each warning comes once."""

    def __init__(self) -> None:
        self.under_way = False
        """Between the begin and the end of an update."""
        self._batches = 0
        self._updates: int | None = None
        """Since a loader gave a batch; None: no loop over a loader is under way."""
        self.microbatch_step: MicrobatchStep | None = None
        """The one under way, in a loop over microbatches."""
        self._warned_missing = False
        self._warned_second = False

    @property
    def after_update(self) -> bool:
        """True when the loop has committed its batch, and not asked for the next one yet."""
        return bool(self._updates)

    def batch_given(self) -> None:
        """Count a batch; after many without an update, warn."""
        self._batches += 1
        self._updates = 0
        if self._batches == MANY_BATCHES:
            self.warn_if_missing()

    def loop_left(self) -> None:
        """Note that no loop over a loader is under way."""
        self._updates = None
        self.microbatch_step = None

    def updated(self, *, tell: bool) -> None:
        """Count an update. A fault between two for one batch would skip the second: warn.

        Args:
            tell: this rank warns, for all.
        """
        self._warned_missing = True
        if self._updates is None:
            return
        self._updates += 1
        if self._updates == 2 and not self._warned_second:
            self._warned_second = True
            if tell:
                log.warning(
                    "two `with s.update():` for one batch: a fault between them skips the second; "
                    "put all optimizers of a batch into one"
                )

    def warn_if_missing(self) -> None:
        """Warn if there were batches and no update."""
        if self._batches and not self._warned_missing:
            log.warning(
                "%d batches and not one `with s.update():` around opt.step(): no step is kept",
                self._batches,
            )
            self._warned_missing = True
