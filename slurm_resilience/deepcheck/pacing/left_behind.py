"""Find what a killed deep check has left behind: its reservation, and labels. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from slurm_resilience.deepcheck.deep_marks import status_of
from slurm_resilience.deepcheck.deep_results import DeepState
from slurm_resilience.model import Node
from slurm_resilience.slurm.reservations import Reservation

UNUSED_SECONDS = 120.0
"""A reservation of ours without a job for so long is no run's: between two steps it has none for a
second or two."""
_OURS = re.compile(r"sres-deepcheck-[0-9a-f]{8}")
_MARK = re.compile(r"\bFlags=\S*\bMAINT\b")


def is_ours(reservation: Reservation) -> bool:
    """Tell whether a run of deep checks has made a reservation, by its name and its mark."""
    return bool(_OURS.fullmatch(reservation.name)) and bool(_MARK.search(reservation.terms))


class LeftBehind:
    """Remembers since when each thing is unused. Moments are of the monotonic clock."""

    def __init__(self) -> None:
        self._unused: dict[str, float] = {}

    def reservations(
        self, shown: Iterable[Reservation], in_use: Collection[str], moment: float
    ) -> tuple[Reservation, ...]:
        """Return the reservations to remove.

        Args:
            shown: all that there are.
            in_use: names of those in which a job runs, waits or ends.
            moment: now.
        """
        unused = {one.name: one for one in shown if is_ours(one) and one.name not in in_use}
        return tuple(unused[name] for name in self._since("reservation", unused, moment))

    def labels(
        self,
        nodes: Iterable[Node],
        reserved: Collection[str],
        freed: Collection[str],
        moment: float,
    ) -> tuple[str, ...]:
        """Return the nodes that are labelled as if a check ran, and that no run has.

        Args:
            nodes: as Slurm shows them.
            reserved: nodes of our reservations.
            freed: nodes of those that are removed now: their run is gone, so they wait no more.
            moment: now.
        """
        stuck = [
            node.name
            for node in nodes
            if status_of(node) == DeepState.IN_PROGRESS and node.name not in reserved
        ]
        for name in freed:
            self._unused[f"label {name}"] = moment - UNUSED_SECONDS
        return self._since("label", stuck, moment)

    def _since(self, kind: str, unused: Collection[str], moment: float) -> tuple[str, ...]:
        """Return those that have been unused for long enough."""
        keys = {f"{kind} {name}": name for name in unused}
        for key in list(self._unused):
            if key.startswith(f"{kind} ") and key not in keys:
                del self._unused[key]
        for key in keys:
            self._unused.setdefault(key, moment)
        return tuple(
            name for key, name in keys.items() if moment - self._unused[key] >= UNUSED_SECONDS
        )
