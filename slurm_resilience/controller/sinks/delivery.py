"""Decide what a sink is sent next, and when a refused one is tried again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

MAX_BATCH_EVENTS = 100
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0
"""A sink that refuses is tried again after the first, then twice as long, up to the second."""
GIVE_UP_SECONDS = 86400.0
"""Events older than this are not sent any more: a sink that was away for days gets no flood."""
TROUBLE_AFTER_SECONDS = 300.0
"""An alarm is raised when a sink has taken nothing for this long."""
PULSE_SECONDS = 60.0
"""`alive` is sent only if a cycle has ended within this time: its absence is the news."""


class Delivery(msgspec.Struct, frozen=True):
    """The progress of one sink. Times are moments of the monotonic clock; 0: never."""

    sent: int
    """The id of the last event that the sink took, or that it was not to get."""
    failures: int = 0
    """Refusals in a row."""
    failing_since: float = 0.0
    retry_at: float = 0.0
    error: str = ""
    alive_at: float = 0.0
    """When `alive` was taken last."""


def taken(delivery: Delivery, up_to: int) -> Delivery:
    """Return the progress after the sink took all events up to an id."""
    return Delivery(sent=max(delivery.sent, up_to), alive_at=delivery.alive_at)


def refused(delivery: Delivery, error: str, moment: float) -> Delivery:
    """Return the progress after the sink refused, or could not be reached."""
    wait = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(delivery.failures, 10))
    return msgspec.structs.replace(
        delivery,
        failures=delivery.failures + 1,
        failing_since=delivery.failing_since or moment,
        retry_at=moment + wait,
        error=error,
    )


def rewound(delivery: Delivery, newest: int) -> Delivery:
    """Return the progress in a journal whose newest event is older than what was sent.

    An earlier copy of the journal was put back, or all that it held was too old to be kept.
    """
    return msgspec.structs.replace(delivery, sent=min(delivery.sent, newest))


def split_by_age(
    events: Sequence[Mapping[str, Any]], now: float
) -> tuple[list[Mapping[str, Any]], int]:
    """Return the events that are still worth sending, and the number of those that are not.

    Args:
        events: as the journal has them.
        now: seconds since the epoch.
    """
    fresh = [event for event in events if now - event["at"] <= GIVE_UP_SECONDS]
    return fresh, len(events) - len(fresh)


def wants_alive(delivery: Delivery, every: float, pulse: float, moment: float) -> bool:
    """Tell whether `alive` is due.

    Args:
        delivery: the sink's progress.
        every: seconds between two; 0: only one, at sresctld's start.
        pulse: when the last cycle ended; 0: none has.
        moment: this one.
    """
    if not pulse or moment - pulse > PULSE_SECONDS:
        return False
    return not delivery.alive_at or 0 < every <= moment - delivery.alive_at


def trouble(delivery: Delivery, busy_since: float, moment: float) -> str:
    """Return why people cannot rely on the sink; empty: they can.

    Args:
        delivery: its progress.
        busy_since: when the sending began that has not ended yet; 0: none is under way.
        moment: this one.
    """
    starts = [since for since in (delivery.failing_since, busy_since) if since]
    if not starts or moment - min(starts) < TROUBLE_AFTER_SECONDS:
        return ""
    reason = delivery.error or "it does not answer"
    return f"has taken no event for {(moment - min(starts)) / 60:.0f} min: {reason}"
