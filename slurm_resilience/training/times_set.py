"""A count of the times at which this library has set the process's random states, or a world has
begun: a thread that compares states has seen no draw of its own then."""

from __future__ import annotations


class TimesSet:
    """The count."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


TIMES_SET = TimesSet()
