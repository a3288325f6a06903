"""The end of what is too old: after its time, and never because the date was set."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from worlds import FakeClock, config

from slurm_resilience.controller.main import Controller
from slurm_resilience.controller.retention import is_proven, observe_date
from slurm_resilience.wire.messages import Message, PauseRequest

DAY = 86400.0
YEAR = 365 * DAY
KEEP = 180 * DAY


class Root:
    """The connection of a person who may pause sresctld."""

    role, subject, uid = "query", "", 0

    def send(self, message: Message) -> None:
        """Take an answer."""


class Site:
    """A state directory on which one sresctld after the other works."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        self._config = config(controller={"state_dir": str(directory), "keep": KEEP})

    def start(self) -> Controller:
        slurm = FakeSlurm(2)
        return Controller(self._config, slurm, slurm.info(), self.clock)  # type: ignore[arg-type]

    def live(self, days: float, rows: list[str] | None = None) -> list[str]:
        """Run sresctld for so long, with a look every hour; return the rows that are left.

        Args:
            days: so long.
            rows: the texts of rows to write first, each with `/` and its age in days.
        """
        controller = self.start()
        with contextlib.closing(controller):
            for row in rows or []:
                age = float(row.rpartition("/")[2])
                controller.journal.event(self.clock.now() - age * DAY, "alarm", row)
            for _ in range(round(days * 24)):
                self.clock.pass_time(3600.0)
                controller._adopt_the_date()
                controller._retention.look()
            return sorted(event["text"] for event in controller.journal.events())


def test_old_rows_are_dropped_and_young_ones_stay(tmp_path: Path) -> None:
    site = Site(tmp_path)
    rows = ["old/181", "young/100"]
    assert site.live(6, rows) == rows
    assert site.live(2) == ["young/100"]


def test_a_date_in_the_future_drops_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.live(8, ["young/100"])
    site.clock.time += YEAR
    assert site.live(0) == ["young/100"]  # a start
    assert site.live(5) == ["young/100"]
    site.clock.time -= YEAR
    assert site.live(5) == ["young/100"]


def test_a_date_that_is_set_while_sresctld_runs_drops_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.live(8, ["young/100"])
    controller = site.start()
    with contextlib.closing(controller):
        site.clock.time += YEAR
        for _ in range(48):
            site.clock.pass_time(3600.0)
            controller._adopt_the_date()
            controller._retention.look()
        assert [event["text"] for event in controller.journal.events()] == ["young/100"]


def test_a_restart_every_few_hours_does_not_put_it_off_for_ever(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.live(0, ["old/181"])
    for _ in range(100):
        site.live(0.25)
    assert site.live(0) == []


@pytest.mark.parametrize(
    ("later", "passed", "keep", "steady"),
    [
        (3600.0, 3600.0, KEEP, 103600.0),
        (3600.0 + 600.0, 3600.0, KEEP, 103600.0),  # a drift that was put right
        (0.9 * DAY, 0.0, KEEP, 100000.0),  # sresctld was away
        (2 * DAY, 0.0, KEEP, 0.0),
        (3600.0 + YEAR, 3600.0, KEEP, 0.0),
        (3600.0 - YEAR, 3600.0, KEEP, 0.0),
        (3600.0 + 7200.0, 3600.0, 36000.0, 0.0),  # much, beside what is kept
    ],
)
def test_a_step_is_told_from_time_that_passed(
    later: float, passed: float, keep: float, steady: float
) -> None:
    first = observe_date(None, 1e9, 0.0, keep)
    assert not is_proven(first, keep)
    known = observe_date(first, 1e9 + 100000.0, 100000.0, keep)
    assert observe_date(known, 1e9 + 100000.0 + later, passed, keep).steady == steady


def test_a_journal_that_is_removed_under_sresctld_holds_it_still(tmp_path: Path) -> None:
    """A directory that was cleaned up: its runs look lost, and would be begun a second time."""
    controller = Site(tmp_path / "state").start()
    with contextlib.closing(controller):
        assert "nothing to do" in controller.cycle()
        (tmp_path / "state").rename(tmp_path / "moved")
        assert "was removed or exchanged under this sresctld" in controller.cycle()
        (tmp_path / "moved").rename(tmp_path / "state")
        assert "nothing to do" in controller.cycle()


def test_a_pause_outlasts_a_time_without_its_journal(tmp_path: Path) -> None:
    """It was taken out of the inbox, and forgotten: sresctld acted as soon as all was mended."""
    controller = Site(tmp_path / "state").start()
    with contextlib.closing(controller):
        controller.cycle()
        (tmp_path / "state").rename(tmp_path / "moved")
        controller.inbox.received(Root(), PauseRequest("stop"))  # type: ignore[arg-type]
        assert "was removed or exchanged" in controller.cycle()
        (tmp_path / "moved").rename(tmp_path / "state")
        assert "paused (stop)" in controller.cycle()


def test_a_journal_that_cannot_be_read_holds_sresctld_still(tmp_path: Path) -> None:
    controller = Site(tmp_path).start()
    with contextlib.closing(controller):
        row = ("incidents (id, node, state, body)", "(1, 'n1', 'empty', '{\"state\": \"new\"}')")
        controller.journal._db.execute(f"INSERT INTO {row[0]} VALUES {row[1]}")
        assert "cannot be read" in controller.cycle()
