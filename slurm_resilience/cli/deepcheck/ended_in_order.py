"""End a run as Ctrl-C does, whatever signal ends it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import click

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let TERM, and the loss of the terminal, end a run as Ctrl-C does: its jobs and its
    reservation go with it. A second one does not cut that short."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    # nohup's choice stays.
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo("ending the jobs, and removing the reservation: up to 30 s", err=True)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
