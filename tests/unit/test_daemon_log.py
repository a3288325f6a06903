"""The daemons' log: what users write reaches no terminal as a command."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from slurm_resilience import daemon_log
from slurm_resilience.daemon_log import PatientStream, RecentLines


def test_control_characters_of_users_are_shown_as_such() -> None:
    recent = RecentLines()
    made = logging.LogRecord(
        "sresctld", logging.INFO, "", 0, "%s stays", ("sh\x1b[2J\r\x07",), None
    )
    recent.emit(made)
    (line,) = recent.tail(1, 1000)
    assert line.endswith("I sresctld: sh?[2J?? stays")


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("sresd", logging.INFO, "", 0, text, (), None)


def test_a_log_that_is_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_log, "MAX_WAITING", 5)
    monkeypatch.setattr(daemon_log, "FLUSH_SECONDS", 0.05)
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    while True:
        try:
            os.write(sink, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(sink, True)
    with os.fdopen(sink, "w") as stream, os.fdopen(source, "rb") as reader:
        handler = PatientStream(stream)
        logged = threading.Thread(
            target=lambda: [handler.emit(record(f"line {n}")) for n in range(20)], daemon=True
        )
        logged.start()
        logged.join(10)
        assert not logged.is_alive()
        handler.flush()  # gives up
        lines = []
        while not lines or "found no room" not in lines[-1]:
            lines.append(reader.readline().decode())
        assert lines[0].endswith("line 0\n")
        monkeypatch.setattr(daemon_log, "FLUSH_SECONDS", 10.0)
        handler.emit(record("the last"))
        handler.flush()
        while "the last" not in lines[-1]:
            lines.append(reader.readline().decode())
