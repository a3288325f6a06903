"""Remember which seats stood still between two steps, to wait for them the next time.

What a loop does there is the program's own: it saves, or evaluates, every so many steps. A rank
that was ended in the middle of it would be ended the next time too, and never get it done. So a
seat that has stood still there once has the time of a first step from then on, and after the second
time all that there is. Of what stands still in a step nothing is remembered here. Pure, but for
what it keeps.
"""

from __future__ import annotations

from slurm_resilience.training.watch.hang import RankSign
from slurm_resilience.training.watch.progress import BETWEEN

OFTEN = 2
"""Times that a seat stood still after which it has all the time that there is."""


class SlowBetween:
    """The seats, as this process saw them.

    Args:
        first: seconds that a seat has the second time.
        ceiling: seconds that it has later.
    """

    def __init__(self, first: float, ceiling: float) -> None:
        self._first = min(first, ceiling)
        self._ceiling = ceiling
        self._times: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def replaced(self, seat: int) -> None:
        """Note that another process had this one's seat before: it may have stood still. The others
        know, and judge."""
        self._times[seat] = OFTEN

    def hung(self, sign: RankSign) -> None:
        """Note that a world ended because of this rank."""
        seat = sign.seat
        if sign.phase == BETWEEN and self._last.get(seat) != sign.step:
            self._last[seat] = sign.step
            self._times[seat] = self._times.get(seat, 0) + 1

    def seconds(self, sign: RankSign) -> float:
        """Return how long this rank may stand still; 0: no longer than others."""
        times = self._times.get(sign.seat, 0)
        if sign.phase != BETWEEN or not times:
            return 0.0
        return self._first if times < OFTEN else self._ceiling
