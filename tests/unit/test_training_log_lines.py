"""Warnings of a training process carry its seat, unless the program has a logging of its own."""

from __future__ import annotations

import logging

import pytest

from slurm_resilience.training.recovery.log_lines import LogLines


@pytest.mark.parametrize("handlers", [[], [logging.NullHandler()]])
def test_lines_are_for_programs_without_logging(
    handlers: list[logging.Handler],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    line = logging.makeLogRecord({"msg": "healed to step %d", "args": (7,), "levelno": 30})
    LogLines(3).handle(line)
    assert capsys.readouterr().err == ("" if handlers else "sres: seat 3: healed to step 7\n")
