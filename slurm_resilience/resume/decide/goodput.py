"""Add up where the time of a supervised program went. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec


class SpentAttempt(msgspec.Struct, frozen=True):
    """One attempt's time. Seconds since the epoch, and seconds."""

    started: float
    ended: float
    cause: str
    """The kind of what ended it."""
    done_again: float = 0.0
    """Work that is not behind a step which it reported."""
    is_exact: bool = True
    """False: the program reported no step, so that less may have been lost."""
    stopped: dict[str, float] = {}
    """Kind of fault → seconds in which it stood still within the attempt."""


class Goodput(msgspec.Struct, frozen=True):
    """The sum over all attempts."""

    seconds: float
    """From the first start to the end."""
    lost: dict[str, float]
    """Kind of fault → seconds that it cost."""
    is_exact: bool
    """False: at most so much was lost."""

    @property
    def share(self) -> float:
        """Return the part of the time in which work was done that counts."""
        if self.seconds <= 0:
            return 1.0
        return max(0.0, 1.0 - sum(self.lost.values()) / self.seconds)


def add_up(attempts: Sequence[SpentAttempt], *, ended_well: bool) -> Goodput:
    """Return the time lost by cause.

    An attempt costs the work that is done once more, and the time until the next one starts.

    Args:
        attempts: the oldest first; at least one.
        ended_well: nothing of the last one is done once more.
    """
    lost: dict[str, float] = defaultdict(float)
    exact = True
    for number, spent in enumerate(attempts):
        for cause, seconds in spent.stopped.items():
            lost[cause] += seconds
        is_last = number + 1 == len(attempts)
        if is_last and ended_well:
            break
        lost[spent.cause] += spent.done_again
        exact = exact and spent.is_exact
        if not is_last:
            lost[spent.cause] += max(0.0, attempts[number + 1].started - spent.ended)
    whole = max(0.0, attempts[-1].ended - attempts[0].started)
    return Goodput(whole, {cause: seconds for cause, seconds in lost.items() if seconds}, exact)


def in_words(goodput: Goodput) -> tuple[str, str]:
    """Return the share with its time, and what was lost by cause, the most first."""
    least = "" if goodput.is_exact else "at least "
    most = "" if goodput.is_exact else "at most "
    # Rounded down: 99.96 % is not all of it.
    share = int(goodput.share * 1000) / 10
    by_cause = sorted(goodput.lost.items(), key=lambda item: -item[1])
    lost = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in by_cause)
    total = sum(goodput.lost.values())
    return (
        f"{least}{share:g} % of {duration(goodput.seconds)}",
        f"{most}{duration(total)}: {lost}" if lost else "nothing",
    )


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
