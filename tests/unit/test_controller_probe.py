"""One probe: what counts as the node's silence, and what is this machine's own trouble."""

from __future__ import annotations

import errno
import queue
import socket
import threading

import pytest
from worlds import FakeClock

from slurm_resilience.clock import SystemClock
from slurm_resilience.controller import probe as probe_module
from slurm_resilience.controller.probe import (
    LOOK_UP_SECONDS,
    MIN_PAUSE_SECONDS,
    SERIES_END_SECONDS,
    AddressBook,
    Answered,
    Prober,
    ThreadDialer,
    probe,
)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TimeoutError(), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route to host"), "silent"),
        (ConnectionRefusedError(), "refused"),
        (OSError(errno.EMFILE, "too many open files"), None),
        (OSError(errno.ENETUNREACH, "network is unreachable"), None),
        (OSError(errno.EINVAL, "a blackhole route of this machine's"), None),
        (PermissionError(errno.EACCES, "a prohibit route of this machine's"), None),
        (PermissionError(errno.EPERM, "this machine's firewall"), None),
    ],
)
def test_what_an_error_says(
    error: OSError, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert probe(("192.0.2.1",), 6818, 1.0) == says


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_a_name_that_is_gone_is_no_silence(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before its address was known, nor after: that address is tried."""
    names = {"n1": "192.0.2.1"}
    tried: list[tuple[str, int]] = []

    def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror(code, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[name], 0))]

    def connect(place: tuple[str, int], **_: object) -> socket.socket:
        tried.append(place)
        return socket.socket()

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    dialer = ThreadDialer(SystemClock(), 1.0, AddressBook(SystemClock()))
    answers: list[str | None] = []
    for gone in (False, True):
        if gone:
            names.clear()
        for name in ("n1", "n2"):
            heard = threading.Event()

            def done(_: float, answer: str | None, heard: threading.Event = heard) -> None:
                answers.append(answer)
                heard.set()

            dialer.dial(name, 6818, done)
            assert heard.wait(10)
    dialer.close()
    assert answers == ["answered", None, "answered", None]
    assert tried == [("192.0.2.1", 6818)] * 2


def test_many_silent_nodes_are_probed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 nodes fell silent together, and the last one was tried 16 seconds after the first."""
    together = threading.Barrier(200)
    before = set(threading.enumerate())
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def wait(*_: object) -> str:
        together.wait(10)  # else broken: the others wait for a free thread
        return "silent"

    monkeypatch.setattr(probe_module, "probe", wait)
    dialer = ThreadDialer(SystemClock(), 1.0, AddressBook(SystemClock()))
    for _ in range(200):
        dialer.dial("127.0.0.1", 6818, lambda _, answer: answers.put(answer))
    assert {answers.get(timeout=20) for _ in range(200)} == {"silent"}
    dialer.close()
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)


def test_a_name_that_is_none_has_no_address() -> None:
    assert AddressBook(SystemClock()).look_up("n1..example") == ()


def test_a_name_server_that_hangs_keeps_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced node that lived was not let in while it hung, and was replaced once more."""
    hangs, asked = threading.Event(), list[str]()

    def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(name)
        if asked.count(name) > 1 or name == "n3":
            hangs.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    clock = FakeClock()
    waits: list[float] = []

    def wait(event: threading.Event, seconds: float) -> bool:
        if is_prompt:
            return event.wait(10)
        waits.append(seconds)
        clock.pass_time(seconds + 0.1)
        return event.is_set()

    monkeypatch.setattr(clock, "wait", wait)
    book, is_prompt = AddressBook(clock), True
    assert book.look_up("n1") == book.look_up("n2") == ("192.0.2.1",)
    is_prompt = False
    assert book.look_up("n1") == ("192.0.2.1",)
    assert book.look_up("n2") == ("192.0.2.1",)
    assert book.look_up("n3") == ()
    assert book.look_up("192.0.2.9") == ("192.0.2.9",)
    assert waits == [LOOK_UP_SECONDS] * 2, "for the first, and for the one that is not known"
    hangs.set()
    is_prompt = True
    assert book.look_up("n3") == ("192.0.2.1",)


def test_a_machine_with_two_addresses_is_silent_only_on_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says: dict[str, OSError] = {"::1": OSError(errno.ENETUNREACH, "no route")}

    def connect(place: tuple[str, int], **_: object) -> socket.socket:
        if place[0] in says:
            raise says[place[0]]
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    assert probe(("::1", "192.0.2.1"), 6818, 1.0) == "answered"
    assert probe(("::1",), 6818, 1.0) is None
    says["192.0.2.1"] = TimeoutError()
    assert probe(("::1", "192.0.2.1"), 6818, 1.0) == "silent"


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
    lived_at = clock.monotonic()
    prober.request("n1", "192.0.2.1", 6818, lived_at)
    dialer.says = "silent"
    for seconds in (SERIES_END_SECONDS + 1.0, 1.0):
        clock.pass_time(seconds)
        prober.request("n1", "192.0.2.1", 6818, lived_at)
    tried = prober.results()["n1"]
    assert [result.answer for result in tried] == ["answered", "silent", "silent"]
    assert tried[0].started == lived_at
    prober.forget("n1")
    assert prober.results() == {}


def test_an_earlier_silence_slows_no_probe_of_the_next_one() -> None:
    """A node that dies again within a minute of its return was found dead seconds late."""
    clock = FakeClock()
    dialer = Answering(clock)
    dialer.says = "silent"
    prober = Prober(clock, 1.0, dialer)
    fell_silent = clock.monotonic()
    for _ in range(30):
        prober.request("n1", "192.0.2.1", 6818, fell_silent)
        clock.pass_time(1.0)
    again = clock.monotonic()
    prober.request("n1", "192.0.2.1", 6818, again)
    clock.pass_time(2 * MIN_PAUSE_SECONDS)
    prober.request("n1", "192.0.2.1", 6818, again)
    assert [result.started for result in prober.results()["n1"]] == [
        again,
        again + 2 * MIN_PAUSE_SECONDS,
    ]
