"""The daemons' log: what users write reaches no terminal as a command."""

from __future__ import annotations

import logging

from slurm_resilience.daemon_log import RecentLines


def test_control_characters_of_users_are_shown_as_such() -> None:
    recent = RecentLines()
    made = logging.LogRecord(
        "sresctld", logging.INFO, "", 0, "%s stays", ("sh\x1b[2J\r\x07",), None
    )
    recent.emit(made)
    (line,) = recent.tail(1, 1000)
    assert line.endswith("I sresctld: sh?[2J?? stays")
