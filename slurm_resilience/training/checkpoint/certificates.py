"""Mark checkpoints after which all replicas of the model were equal, and those that are doubtful.

Both are empty files in a checkpoint's directory, so that the next process finds them too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.training.checkpoint import names

log = logging.getLogger(__name__)

CERTIFIED, DOUBTFUL = "certified", "doubtful"
"""Names of the files."""


class CertifyOrder(NamedTuple):
    """An order to the writing thread: it comes behind the saves that are under way."""

    until: int
    """The last step that is certified."""
    leads: bool
    """True: this rank writes it down."""


class Certificates:
    """The certificates in a directory, as one process knows them. Threads may share it.

    Args:
        path: of the directory.
        prefer: certified checkpoints are read before newer ones that are not.
    """

    def __init__(self, path: Path, *, prefer: bool = False) -> None:
        self.prefer = prefer
        self.newest = -1
        """Step of the newest certified checkpoint that this process knows of; -1: none."""
        self._path = path
        self._lock = threading.Lock()
        self._under_way: list[int] = []
        self._uncertified: list[int] = []
        """Steps that this process has saved, and that wait for a certificate."""
        self._doubted: set[int] = set()
        """Steps whose save was under way when replicas were seen to differ."""

    # -- what is on the disk ----------------------------------------------------------------------

    def is_certified(self, step: int) -> bool:
        """Tell whether all replicas were equal after a checkpoint was made."""
        return (self._path / names.done(step) / CERTIFIED).exists()

    def is_doubtful(self, step: int) -> bool:
        """Tell whether replicas differed when a checkpoint was made, or soon after."""
        return (self._path / names.done(step) / DOUBTFUL).exists()

    def in_order(self, steps: Iterable[int]) -> list[int]:
        """Return steps in the order in which they are to be read: newest first, those that are
        doubtful last, and certified ones before all others if that is wished."""
        order = sorted(steps, reverse=True)
        order.sort(key=lambda step: self.prefer and not self.is_certified(step))
        order.sort(key=self.is_doubtful)
        return order

    def _mark(self, step: int, word: str) -> None:
        try:
            (self._path / names.done(step) / word).touch()
        except FileNotFoundError:
            return  # it is gone
        except OSError as error:
            log.warning("checkpoint of step %d cannot be marked %s: %s", step, word, error.strerror)

    # -- what this process saves ------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Note that a save begins."""
        with self._lock:
            self._under_way.append(step)

    def end(self, step: int, *, saved: bool) -> None:
        """Note that the oldest save has ended."""
        with self._lock:
            self._under_way.pop(0)
            is_doubted = step in self._doubted
            self._doubted.discard(step)
            if saved and not is_doubted:
                self._uncertified.append(step)
        if saved and is_doubted:
            self._mark(step, DOUBTFUL)

    @property
    def is_awaited(self) -> bool:
        """True while there is something to certify."""
        return bool(self._uncertified or self._under_way)

    def certify(self, order: CertifyOrder) -> None:
        """Certify what was saved up to a step."""
        with self._lock:
            steps = [step for step in self._uncertified if step <= order.until]
            self._uncertified = [step for step in self._uncertified if step > order.until]
        if order.leads:
            for step in steps:
                self._mark(step, CERTIFIED)
        self.newest = max([self.newest, *steps])

    def doubt(self, after: int, finished: Iterable[int]) -> None:
        """Doubt what was saved after a step.

        Args:
            after: all replicas were equal then.
            finished: steps of checkpoints that this rank marks.
        """
        with self._lock:
            self._doubted |= {step for step in self._under_way if step > after}
            self._uncertified = [step for step in self._uncertified if step <= after]
        for step in finished:
            if step > after and not self.is_certified(step):
                self._mark(step, DOUBTFUL)

    def loaded(self, step: int) -> None:
        """Note that a checkpoint was loaded."""
        if self.is_certified(step):
            self.newest = step

    def begin_at(self, step: int) -> None:
        """Note the step from which the training goes on: what comes after it is done anew."""
        self.newest = min(self.newest, step)
