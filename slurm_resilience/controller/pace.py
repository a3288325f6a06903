"""Tell how far apart rounds begin: of a large cluster, each takes its time. Pure."""

from __future__ import annotations

import enum

TICK_SECONDS = 0.25
"""Between two rounds while work is under way, where a round costs little."""
LIGHT_SECONDS = 0.1
"""A round that costs less processor time than this may follow on another at once."""


class RoundCause(enum.Enum):
    """The cause of the next round, with the share of one core that such rounds may take, and the
    most seconds that one waits for its share."""

    QUIET = (0.025, 10.0)
    """Nothing is under way."""
    BUSY = (0.2, 2.0)
    """A node is silent, a repair runs, a requeued job waits."""
    WOKEN = (0.5, 1.0)
    """Something has just come: a message, the answer to a probe."""


def pause_before(cause: RoundCause, interval: float, cost: float) -> float:
    """Return how many seconds after the last round began the next one may begin.

    Args:
        cause: of the next one.
        interval: `controller.interval`.
        cost: processor seconds that the last round took, with Slurm's commands.
    """
    share, most = cause.value
    paced = min(cost / share, most)
    match cause:
        case RoundCause.QUIET:
            return max(interval, paced)
        case RoundCause.BUSY:
            return max(min(TICK_SECONDS, interval), paced)
        case RoundCause.WOKEN:
            return paced if cost > LIGHT_SECONDS else 0.0
