"""A moment that Slurm prints means the same, wherever the time zone is set to."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from slurm_resilience.cli.tables import seconds_since
from slurm_resilience.clock import seconds_of, stamp_of
from slurm_resilience.deepcheck.deep_marks import booted_at
from slurm_resilience.model import Node
from slurm_resilience.slurm.cli import environment
from slurm_resilience.slurm.maintenance import read_busy
from slurm_resilience.slurm.reservations import is_over, read_reservations

AT = 1796025600.0
STAMP = "2026-11-30T08:00:00"


@pytest.fixture(params=["UTC0", "JST-9", "EST5EDT"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


def test_the_commands_print_in_utc(zone: str) -> None:
    """A mark's time is kept in the journal: with another one it would read like a person's."""
    assert environment()["TZ"] == "UTC0"
    assert (seconds_of(STAMP), stamp_of(AT)) == (AT, STAMP)


def test_their_times_are_read_so(zone: str) -> None:
    assert seconds_since(STAMP, AT + 60.0) == 60.0
    assert booted_at(Node("n1", "IDLE", boot_time=STAMP)) == AT
    assert read_busy(f"NodeName=n1 LastBusyTime={STAMP} x=y") == {"n1": AT}
    shown = f"ReservationName=r StartTime={STAMP} EndTime={STAMP} Nodes=n1"
    (found,) = read_reservations(shown)
    assert found.starts_at == AT
    assert [is_over(found.terms, AT + late) for late in (-1.0, 1.0)] == [False, True]
