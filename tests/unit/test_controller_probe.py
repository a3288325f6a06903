"""One probe: what counts as the node's silence, and what is this machine's own trouble."""

from __future__ import annotations

import errno
import socket

import pytest
from worlds import FakeClock

from slurm_resilience.controller.probe import SERIES_END_SECONDS, Answered, Prober, probe


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TimeoutError(), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route to host"), "silent"),
        (socket.gaierror(socket.EAI_NONAME, "unknown name"), "silent"),
        (ConnectionRefusedError(), "refused"),
        (OSError(errno.EMFILE, "too many open files"), None),
        (OSError(errno.ENETUNREACH, "network is unreachable"), None),
        (socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution"), None),
    ],
)
def test_what_an_error_says(
    error: OSError, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert probe("n1", 6818, 1.0) == says


class Answering:
    """A dialer whose nodes answer at once, as the test says."""

    says = "answered"

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def dial(self, address: str, port: int, done: Answered) -> None:
        done(self._clock.monotonic(), self.says)  # type: ignore[arg-type]

    def close(self) -> None:
        return


def test_the_last_answer_outlives_its_series() -> None:
    """A node without sresd is probed every minute in the end: what it said last still counts."""
    clock = FakeClock()
    dialer = Answering(clock)
    prober = Prober(clock, 1.0, dialer)
    prober.request("n1", "192.0.2.1", 6818)
    lived_at = clock.monotonic()
    dialer.says = "silent"
    for seconds in (SERIES_END_SECONDS + 1.0, 1.0):
        clock.pass_time(seconds)
        prober.request("n1", "192.0.2.1", 6818)
    tried = prober.results()["n1"]
    assert [result.answer for result in tried] == ["answered", "silent", "silent"]
    assert tried[0].started == lived_at
    prober.forget("n1")
    assert prober.results() == {}
