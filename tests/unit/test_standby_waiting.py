"""When a standby may become active: its slurmctld is in control, and no other sresctld acts."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.standby.follower import KEPT_ASIDE, JournalFile
from slurm_resilience.controller.standby.recorded_connection import begin_history
from slurm_resilience.controller.standby.shipper import copy_of, parts_of
from slurm_resilience.controller.standby.waiting import Standby, StandbyBorders
from slurm_resilience.errors import NotPermitted, SlurmUnreachable, WireError
from slurm_resilience.slurm.controllers import ControllerHost
from slurm_resilience.wire.messages import JournalHead, JournalRecords, Message, Refused

OTHER = ControllerHost(0, "ctl", "10.0.0.1")
MOST_WAITS = 60


class Line:
    """A connection whose other side has said this much."""

    def __init__(self, *messages: Message) -> None:
        self.messages = deque(messages)
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, timeout: float) -> Message | None:
        return self.messages.popleft() if self.messages else None

    def close(self) -> None:
        self.messages.clear()


class World:
    """The standby's outside; its clock goes on by each look."""

    def __init__(self, *lines: Line | None) -> None:
        self.lines = deque(lines)
        """The line that each call reaches; None: no answer. The last one stands for all later
        ones."""
        self.is_in_control = True
        self.at = 0.0
        self.stop = threading.Event()

    def dial(self, host: ControllerHost) -> Any:
        line = self.lines.popleft() if len(self.lines) > 1 else self.lines[0]
        if line is None:
            raise WireError("no answer")
        return line

    def check_control(self) -> None:
        if not self.is_in_control:
            raise SlurmUnreachable("in standby mode")

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        self.at += 0.25
        if self.at > MOST_WAITS:
            self.stop.set()
        return self.at

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.is_set()

    def follow(self, journal: JournalFile) -> tuple[bool, str]:
        """Return whether it became active, and who had handed the journal over."""
        standby = Standby(journal, [OTHER], StandbyBorders(self.dial, self.check_control, self))
        return standby.wait(self.stop), standby.handed_over_by


@pytest.fixture
def journal(tmp_path: Path) -> JournalFile:
    return JournalFile(tmp_path / "journal.db")


def test_it_becomes_active_where_no_other_answers(journal: JournalFile) -> None:
    assert World(None).follow(journal) == (True, "")


def test_it_waits_while_its_slurmctld_is_in_standby(journal: JournalFile) -> None:
    world = World(None)
    world.is_in_control = False
    assert world.follow(journal) == (False, "")


def test_it_does_nothing_beside_one_that_is_active(journal: JournalFile) -> None:
    signs = [JournalRecords() for _ in range(1000)]
    assert World(Line(JournalHead("ctl", "", 0, True), *signs)).follow(journal) == (False, "")


def test_an_active_one_that_falls_silent_is_called_anew(journal: JournalFile) -> None:
    assert World(Line(JournalHead("ctl", "", 0, True)), None).follow(journal) == (True, "")


def test_it_never_acts_beside_one_that_knows_no_standby(journal: JournalFile) -> None:
    refusal = NotPermitted("a standby may not send a StandbyHello")
    lines = [Line(Refused(str(refusal), refusal.exit_code)) for _ in range(1000)]
    assert World(*lines).follow(journal) == (False, "")


def test_it_takes_the_newer_journal_of_another_standby_first(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "journal.db")
    other = Journal(tmp_path / "other.db")
    other.pause("for lunch")
    begin_history(other._db, "2-ctl")
    history, position, content = copy_of(tmp_path / "other.db")
    head = JournalHead("ctl", history, position, is_active=False)
    assert World(Line(head)).follow(journal) == (False, "")
    line = Line(head, *parts_of(history, position, content))
    assert World(line).follow(journal) == (True, "ctl")
    assert Journal(tmp_path / "journal.db").paused == "for lunch"
    assert not Journal(tmp_path / KEPT_ASIDE).paused
