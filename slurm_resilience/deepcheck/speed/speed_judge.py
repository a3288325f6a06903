"""Name the devices that are slow without an error, from the history of short measures. Pure.

    recent    the second best of the last `RECENT` measures: whatever disturbs a measure makes it
              slower, so a device that is well shows it in two of them
    baseline  the higher of two medians: of the oldest `REFERENCE` measures, and of all before the
              recent ones. A device that gets slower bit by bit does not take its baseline with it
    own       loss = 1 - recent / baseline, and its distance from the device's own spread
    peers     the same loss beside that of all others of its kind: what slows all of them alike (a
              driver, a hot day) is no single one's

Both must agree: the loss, and the part of it that the peers do not share, are at least
`LOSS_SHARE`, and more than `DISTANCE_FACTOR` spreads. A spread is 1.4826 times the median absolute
deviation, which outliers do not move (Rousseeuw and Croux 1993), and never taken for less than
`LEAST_SPREAD_SHARE`. One that is far below its peers' speed (`STRONG_LOSS_SHARE`) is named without
a history of its own, where measures do not scatter as much.

A link has two ends, and its measure is that of the slower one. An end is named only for measures
with partners that did better with another node in their recent ones: a node that happened to be
measured with the slow one again and again is not named with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from statistics import median
from typing import NamedTuple

RECENT = 6
REFERENCE = 20
LEAST_HISTORY = 8
"""Measures before the recent ones, from which on there is a baseline."""
LEAST_PEERS = 3
"""Others that are needed for a comparison."""
LOSS_SHARE = 0.05
LEAST_OWN = 3
"""Recent measures of a link that its partners do not explain."""
STRONG_LOSS_SHARE = 0.30
"""GPUs of one kind differ by 8 % on average and 22 % at most (Sinha et al., "Not All GPUs Are
Created Equal", SC22): beyond that it is no matter of the silicon."""
DISTANCE_FACTOR = 4.0
LEAST_SPREAD_SHARE = 0.01
_NORMAL_FACTOR = 1.4826


class SpeedKey(NamedTuple):
    """One thing that is measured."""

    node: str
    device: str
    """Its serial number, so that a new device in an old place begins anew."""
    kind: str
    """``compute``, ``memory``, ``link`` or ``collective``."""


class SpeedHistory(NamedTuple):
    """The measures of one thing, the oldest first; more is better."""

    key: SpeedKey
    peers: str
    """The kind of hardware: those with the same are compared."""
    values: tuple[float, ...]
    partners: tuple[str, ...] = ()
    """The node at the other end of a link, for each value; empty: it is no link."""


class SlowDevice(NamedTuple):
    """A device that has fallen behind."""

    key: SpeedKey
    loss: float
    """The part of its speed that it has lost, of its baseline or of its peers' speed."""
    text: str


class _Standing(NamedTuple):
    history: SpeedHistory
    recent: float
    baseline: float
    """0: too little is known."""
    spread: float
    """The spread of the device's own measures, as a part of the baseline."""
    scatter: float
    """The spread of its recent measures."""

    @property
    def loss(self) -> float:
        return 1.0 - self.recent / self.baseline if self.baseline else 0.0

    @property
    def latest_loss(self) -> float:
        return 1.0 - self.history.values[-1] / self.baseline if self.baseline else 0.0


def slow_devices(histories: Iterable[SpeedHistory]) -> tuple[SlowDevice, ...]:
    """Return those that are slow, the slowest first."""
    known = [history for history in histories if len(history.values) >= RECENT]
    groups: dict[tuple[str, str], list[_Standing]] = {}
    for history in known:
        groups.setdefault((history.peers, history.key.kind), []).append(_standing(history))
    not_its_own = _explained_by_partners(known)
    found = [slow for group in groups.values() for slow in _slow_of(group)]
    return tuple(sorted((s for s in found if s.key not in not_its_own), key=lambda one: -one.loss))


def _explained_by_partners(histories: Iterable[SpeedHistory]) -> set[SpeedKey]:
    """Return the links whose partners may be the slow end."""
    links = [one for one in histories if any(one.partners)]
    recent = {
        one.key.node: [*zip(one.partners, one.values, strict=True)][-RECENT:] for one in links
    }

    def is_own(node: str, partner: str, value: float) -> bool:
        elsewhere = [speed for other, speed in recent.get(partner, ()) if other != node]
        return value < (1.0 - LOSS_SHARE) * max(elsewhere, default=0.0)

    return {
        one.key
        for one in links
        if sum(is_own(one.key.node, *measure) for measure in recent[one.key.node]) < LEAST_OWN
    }


def _standing(history: SpeedHistory) -> _Standing:
    values = history.values
    recent, before = sorted(values[-RECENT:])[-2], values[:-RECENT]
    scatter = spread_of(values[-RECENT:])
    if len(before) < LEAST_HISTORY:
        return _Standing(history, recent, 0.0, 0.0, scatter)
    reference = before[:REFERENCE]
    baseline, spread = max(median(reference), median(before)), spread_of(reference)
    return _Standing(history, recent, baseline, max(LEAST_SPREAD_SHARE, spread), scatter)


def spread_of(values: Sequence[float]) -> float:
    """Return the spread of measures, as a part of their median."""
    middle = median(values)
    return (
        _NORMAL_FACTOR * median(abs(value - middle) for value in values) / middle if middle else 0.0
    )


def _slow_of(group: Sequence[_Standing]) -> Iterable[SlowDevice]:
    for number, one in enumerate(group):
        others = [*group[:number], *group[number + 1 :]]
        slow = _beside_peers(one, others) or _far_behind(one, others)
        if slow is not None:
            yield slow


def _beside_peers(one: _Standing, others: Collection[_Standing]) -> SlowDevice | None:
    known = [other.loss for other in others if other.baseline]
    if not one.baseline or len(known) < LEAST_PEERS:
        return None
    # What befalls all is seen at once in their latest measures, while the recent ones still lag
    # behind, more or less by chance.
    shared = max(median(known), median(other.latest_loss for other in others if other.baseline))
    spread = max(LEAST_SPREAD_SHARE, _NORMAL_FACTOR * median(abs(loss - shared) for loss in known))
    own, beyond = one.loss, one.loss - shared
    is_own = own >= LOSS_SHARE and own > DISTANCE_FACTOR * one.spread
    if not (is_own and beyond >= LOSS_SHARE and beyond > DISTANCE_FACTOR * spread):
        return None
    text = (
        f"{_name(one)}: {own:.0%} slower than its own baseline "
        f"({one.recent:.4g} now, {one.baseline:.4g} before; its spread is "
        f"{one.spread:.1%}), while {len(known)} peers lost {max(shared, 0.0):.0%}"
    )
    return SlowDevice(one.history.key, own, text)


def _far_behind(one: _Standing, others: Collection[_Standing]) -> SlowDevice | None:
    if len(others) < LEAST_PEERS:
        return None
    speeds = [other.recent for other in others]
    usual = median(speeds)
    loss = 1.0 - one.recent / usual if usual else 0.0
    # Peers that are alike by chance, or because they were measured together, are not yet steady.
    # A spread may exceed 100 % and a loss may not: its logarithm is as large as the loss at first.
    spread = max(spread_of(speeds), median(each.scatter for each in (one, *others)))
    distance = math.log(usual / one.recent) if usual and one.recent else math.inf
    if loss < STRONG_LOSS_SHARE or distance <= DISTANCE_FACTOR * spread:
        return None
    text = (
        f"{_name(one)}: {loss:.0%} slower than {len(others)} peers of its kind "
        f"({one.recent:.4g}, they have {usual:.4g})"
    )
    return SlowDevice(one.history.key, loss, text)


def _name(one: _Standing) -> str:
    key = one.history.key
    return f"{key.kind} of {key.device} on {key.node}"
