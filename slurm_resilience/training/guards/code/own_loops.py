"""See a loop over a DataLoader of the program's own that does not follow from the step: it begins
anew when the function is called again after a fault."""

from __future__ import annotations

import weakref
from typing import Any

from slurm_resilience.training.compat import batches_of_iterators
from slurm_resilience.training.garbage import newer_objects


class OwnLoops:
    """Those that had given a batch when the program asked for its step for the first time."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Any], int]] | None = None
        """With the number of batches; None: it has not asked yet."""

    def asked(self) -> None:
        """Note those that are under way. What is asked later tells nothing more."""
        if self._seen is None:
            given = batches_of_iterators(newer_objects())
            self._seen = [(weakref.ref(one), number) for one, number in given if number]

    def went_on(self) -> bool:
        """Tell whether one has given more batches since: no validation does, in its update."""
        alive = [one for ref, _ in self._seen or () if (one := ref()) is not None]
        now = {id(one): number for one, number in batches_of_iterators(alive)}
        before = {id(one): n for ref, n in self._seen or () if (one := ref()) is not None}
        return any(number > before[one] for one, number in now.items())
