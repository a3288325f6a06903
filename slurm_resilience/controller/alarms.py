"""Follow alarms from the cycle that raises them to some minutes after their cause is over. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurm_resilience.controller.actions import RaiseAlarm

SHOWN_AFTER_SECONDS = 600.0
"""An alarm is shown this long after the last cycle that raised it."""


class FollowedAlarm(msgspec.Struct, frozen=True):
    """One alarm, as `sres status` shows it."""

    at: float
    """When it was first raised (epoch)."""
    text: str
    node: str
    job: int
    raised: float
    """The last cycle that raised it."""
    over: float = 0.0
    """When its cause was first seen to be over; 0: it is not."""


def follow(
    known: Mapping[str, FollowedAlarm], raised: Iterable[RaiseAlarm], now: float
) -> dict[str, FollowedAlarm]:
    """Return the alarms to show after a cycle, by their key.

    Args:
        known: what this function returned after the cycle before.
        raised: the alarms of this cycle. A cause that lasts raises its alarm in every cycle.
        now: seconds since the epoch.
    """
    current = {
        alarm.key: FollowedAlarm(
            known[alarm.key].at if alarm.key in known else now,
            alarm.text,
            alarm.node,
            alarm.job,
            raised=now,
        )
        for alarm in raised
    }
    ended = {
        key: msgspec.structs.replace(alarm, over=alarm.over or now)
        for key, alarm in known.items()
        if key not in current and now - alarm.raised < SHOWN_AFTER_SECONDS
    }
    return ended | current
