"""Lines by which tasks tell how far they are. Pure.

One line, one datagram, to the address and port that `$SRES_PROGRESS` names behind each other, with
the token that stands third there::

    TOKEN RANK STEP [SECONDS [COUNT]]   SECONDS: own work of a step, without waiting for others; 0:
                                        not told. COUNT: steps that the line stands for
    TOKEN RANK pause                    what follows may take as long as it likes, until the next
                                        step
"""

from __future__ import annotations

import math

import msgspec

VARIABLE = "SRES_PROGRESS"
PAUSE = "pause"
LINE_BYTES = 200
MOST_RANKS = 131_072
MOST_STEPS = 2**63 - 1


class StepLine(msgspec.Struct, frozen=True):
    """One rank's line."""

    rank: int
    step: int | None
    """None: it takes a pause."""
    own_seconds: float = 0.0
    """Its own work of a step, without waiting for others; 0: not told."""
    has_number: bool = True
    """False: `step` only counts what was seen in this attempt, such as the changes of a file."""
    count: int = 1
    """Steps that it stands for: a program with short ones tells of several at once."""


def parse_line(datagram: bytes, token: str) -> StepLine | None:
    """Return what a line tells; None: it is none, or does not carry the token."""
    words = datagram.split()
    if len(datagram) > LINE_BYTES or not 3 <= len(words) <= 5 or words[0] != token.encode():
        return None
    if not words[1].isdigit() or int(words[1]) >= MOST_RANKS:
        return None
    if words[2] == PAUSE.encode():
        return StepLine(int(words[1]), None)
    if not words[2].isdigit() or int(words[2]) > MOST_STEPS:
        return None
    count = int(words[4]) if len(words) == 5 and words[4].isdigit() else 1
    return StepLine(int(words[1]), int(words[2]), _seconds(words[3:]), count=max(1, count))


def _seconds(words: list[bytes]) -> float:
    try:
        seconds = float(words[0]) if words else 0.0
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
