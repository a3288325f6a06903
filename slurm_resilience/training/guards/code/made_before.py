"""See groups and collectives that the function makes when it is called first, and not again: a
process that takes a dead one's place makes them alone, and waits there for the others."""

from __future__ import annotations

import logging
from types import FrameType

from slurm_resilience.training import compat
from slurm_resilience.training.guards.code import kept_globals
from slurm_resilience.training.process_group import ProcessGroups

log = logging.getLogger("sres.training")


class MadeBefore:
    """Groups and collectives of this process, up to some places in the function."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[int, int]] = {}
        """Place → world in which it was passed last, and its process groups then."""
        self._collectives: dict[int, int] = {}
        """Ranks of a world → collectives before `track` in the first one of that size."""

    def passed(self, place: str, group: ProcessGroups, frame: FrameType | None) -> None:
        """Refuse a group that the program made, before it came here, in an earlier world only.

        Args:
            place: in the function.
            group: this world's.
            frame: the caller's.

        Raises:
            UsageError: there is one.
        """
        known, now = compat.known_groups(), group.view.generation
        world, made = self._groups.get(place, (0, 0))
        if world == now:
            return
        self._groups[place] = now, len(known)
        if len(known) < made:
            kept_globals.refuse_left(frame, known)

    def tracks(self, group: ProcessGroups) -> None:
        """Warn of collectives that the program made, before it came to `track`, when it was called
        first, and not now.

        Args:
            group: this world's.
        """
        size, made = group.view.size, group.collectives()
        first = self._collectives.setdefault(size, made)
        if made >= first:
            return
        self._collectives[size] = made
        old = [rank for rank, one in enumerate(group.view.members) if one.status.generation]
        if old and group.rank == old[0]:
            log.warning(
                "collectives before s.track were made when the function was called first (%d), and "
                "not now: a replaced rank, which is called for the first time, waits in them "
                "alone. Make them whenever the function is entered, not by a variable that says "
                "whether it was done, nor by s.attempt (s.generation is the same on all ranks)",
                first - made,
            )
