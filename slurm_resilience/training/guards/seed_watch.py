"""See a program that seeds torch anew after `s.track`: it does so at each entry."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("sres.training")


class SeedWatch:
    """torch's own generator, between `s.track` and the first batch of a world."""

    def __init__(self) -> None:
        self._seed: int | None = None
        """As `s.track` has left it; None: the first batch was given."""
        self._is_fresh = False
        self._told = False

    def note(self) -> None:
        """Note the seed that the healing has left."""
        self._seed, self._is_fresh = torch.initial_seed(), _is_fresh()

    def look(self, *, tell: bool) -> None:
        """Warn if it was seeded since, also with the seed that it had.

        Args:
            tell: this rank warns, for all; not where the program may seed by its step.
        """
        before, self._seed = self._seed, None
        if before is None or self._told or not tell:
            return
        if torch.initial_seed() != before or (_is_fresh() and not self._is_fresh):
            self._told = True
            log.warning(
                "torch was seeded anew after s.track: that is done again after each fault, and "
                "the random numbers of the first steps (dropout) come once more. Seed before "
                "s.track, which goes on where the numbers were, or by s.step"
            )


def _is_fresh() -> bool:
    """Tell whether nothing was drawn since the last seed."""
    fresh = torch.Generator("cpu").manual_seed(torch.initial_seed())
    return torch.equal(torch.get_rng_state(), fresh.get_state())
