"""Warnings of a training process carry its seat, unless the program has a logging of its own."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.training.recovery import log_lines
from slurm_resilience.training.recovery.log_lines import LogLines

LINE = {"msg": "healed to step %d", "args": (7,), "levelno": logging.WARNING}


@pytest.mark.parametrize("handlers", [[], [logging.NullHandler()]])
def test_lines_are_for_programs_without_logging(
    handlers: list[logging.Handler],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    LogLines(3).handle(logging.makeLogRecord(LINE))
    assert capsys.readouterr().err == ("" if handlers else "sres: seat 3: healed to step 7\n")


class Tee:
    """As programs make them to have their output in a file too."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


def full() -> Any:
    return Path("/dev/full").open("w", buffering=1)


def unread() -> Any:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", buffering=1)


@pytest.mark.parametrize("stream", [closed, full, unread, Tee, lambda: None])
def test_a_line_that_cannot_be_written_raises_nothing(
    stream: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A training on a full disk lost its state so: each rank's first recovery began with a line."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    broken = stream()
    monkeypatch.setattr("sys.stderr", broken)
    monkeypatch.setattr("sys.stdout", broken)
    LogLines(3).handle(logging.makeLogRecord(LINE))
    log_lines.write_out()
    text = broken.text if isinstance(broken, Tee) else capfd.readouterr().err
    assert text == "sres: seat 3: healed to step 7\n"
    with contextlib.suppress(Exception):
        broken.close()


class Ours(logging.Handler):
    """A handler of a program."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error
        self.got: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self.error is not None:
            raise self.error
        self.got.append(record.getMessage())


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    for name in log_lines.ROOTS:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    log_lines.speak(3)
    log = logging.getLogger("sres.lines")
    log.setLevel(logging.INFO)
    yield log
    log.setLevel(logging.NOTSET)


def test_a_programs_own_handlers_get_every_line_once(
    spoken: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Ours(None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    spoken.info("a step")
    spoken.warning("a fault")
    assert handler.got == ["a step", "a fault"]


def test_a_handler_that_raises_ends_no_recovery(
    spoken: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [Ours(OSError("no log server"))])
    spoken.warning("a fault")
