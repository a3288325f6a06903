"""Decide whether a rank that left out an update is healed, or only told of."""

from __future__ import annotations

import logging

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.model import View

log = logging.getLogger("sres.training")

MOST = 3
"""Times in a row that such a rank is healed. A program whose ranks take different numbers of
batches for an update on purpose would be healed for ever."""
APART_STEPS = 100
"""Steps after which it is no longer in a row."""


class UpdateLeftOut(SresError):
    """This rank left out an update that others have made."""


class LeftOutUpdates:
    """Those of this process.

    Args:
        heals: parts of the library that heal are on.
    """

    def __init__(self, *, heals: bool) -> None:
        self.reason = ""
        """The one that this process leaves its world for, in words; empty: it does not."""
        self._heals = heals
        self._count = 0
        self._last = 0
        self._told = False

    def heals(self, view: View, step: int, reason: str) -> bool:
        """Tell whether this process leaves its world to be healed; it is told, if it does not.

        Args:
            view: the world.
            step: committed steps.
            reason: for people.
        """
        self._count = self._count + 1 if step - self._last <= APART_STEPS else 1
        self._last = step
        # Without another copy of its part of the model nothing could heal it.
        if self._heals and view.size >= 2 * view.replica_size and self._count <= MOST:
            self.reason = reason
            return True
        if not self._told:
            self._told = True
            log.warning("%s", reason)
        return False
