"""`sres status` is told of alarms that last, sresd's silence, and Slurm's present settings."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from worlds import FakeClock, config

from slurm_resilience.controller.actions import RaiseAlarm
from slurm_resilience.controller.alarms import SHOWN_AFTER_SECONDS, FollowedAlarm, follow
from slurm_resilience.controller.calm.agent_views import AgentPresence, AgentView
from slurm_resilience.controller.main import Controller
from slurm_resilience.controller.slurm_settings import READ_AGAIN_SECONDS
from slurm_resilience.controller.status import _sresd
from slurm_resilience.errors import SlurmUnreachable

LEAK = RaiseAlarm("leak-n1", "GPUs are counted as used", "n1")


def test_an_alarm_lasts_as_long_as_its_cause_and_some_minutes() -> None:
    seen = follow({}, [LEAK], 100.0)
    seen = follow(seen, [LEAK], 200.0)
    assert seen == {"leak-n1": FollowedAlarm(100.0, LEAK.text, "n1", 0, raised=200.0)}
    seen = follow(seen, [], 201.0)
    assert seen["leak-n1"].over == 201.0
    seen = follow(seen, [], 300.0)
    assert seen["leak-n1"].over == 201.0
    assert follow(seen, [], 200.0 + SHOWN_AFTER_SECONDS) == {}


def test_an_alarm_that_comes_back_is_not_over() -> None:
    seen = follow(follow({}, [LEAK], 100.0), [], 200.0)
    seen = follow(seen, [LEAK], 300.0)
    assert (seen["leak-n1"].at, seen["leak-n1"].over) == (100.0, 0.0)


@pytest.mark.parametrize(
    ("agent", "shown"),
    [
        (None, "never seen"),
        (AgentView("n1", AgentPresence.CONNECTED, 0.4, 0.0), "connected"),
        # The machine lost its power: no FIN ever comes.
        (AgentView("n1", AgentPresence.CONNECTED, 4.0, 0.0), "silent"),
        (AgentView("n1", AgentPresence.LOST, 4.0, 0.0), "silent"),
        (AgentView("n1", AgentPresence.STOPPED, 4.0, 0.0), "stopped"),
    ],
)
def test_a_silent_node_is_not_shown_as_connected(agent: AgentView | None, shown: str) -> None:
    assert _sresd(agent, silent_after=1.5) == shown


@pytest.fixture
def sresctld(tmp_path: Path) -> Iterator[tuple[Controller, FakeSlurm, FakeClock]]:
    clock, slurm = FakeClock(), FakeSlurm(2)
    settings = config(controller={"state_dir": str(tmp_path)})
    controller = Controller(settings, slurm, slurm.info(), clock)  # type: ignore[arg-type]
    yield controller, slurm, clock
    controller.close()


def published(controller: Controller) -> dict[str, Any]:
    data: dict[str, Any] = controller.inbox._status.summary
    return data


def test_settings_of_slurm_are_read_again(
    sresctld: tuple[Controller, FakeSlurm, FakeClock],
) -> None:
    controller, slurm, clock = sresctld
    slurm._expansion = False  # scontrol reconfigure
    controller.cycle()
    assert published(controller)["permits_expansion"]
    clock.pass_time(READ_AGAIN_SECONDS)
    slurm.refusals["info"] = SlurmUnreachable("slurmctld restarts")
    controller.cycle()
    assert published(controller)["permits_expansion"]
    del slurm.refusals["info"]
    clock.pass_time(READ_AGAIN_SECONDS)
    controller.cycle()
    assert not published(controller)["permits_expansion"]


def test_an_alarm_is_published_while_its_cause_lasts(
    sresctld: tuple[Controller, FakeSlurm, FakeClock],
) -> None:
    controller, slurm, clock = sresctld
    slurm.set_node(["n1"], state="fail", reason="action:replace")
    controller.cycle()
    (alarm,) = published(controller)["alarms"]
    assert (alarm["node"], alarm["over"]) == ("n1", 0.0)
    slurm.set_node(["n1"], state="resume")
    clock.pass_time(1.0)
    controller.cycle()
    (alarm,) = published(controller)["alarms"]
    assert alarm["over"] == clock.now()
    clock.pass_time(SHOWN_AFTER_SECONDS)
    controller.cycle()
    assert published(controller)["alarms"] == []


def test_the_incident_of_a_node_that_is_not_listed_is_shown(
    sresctld: tuple[Controller, FakeSlurm, FakeClock],
) -> None:
    """For a minute it is not known whether the node has left slurm.conf."""
    controller, slurm, _ = sresctld
    slurm.set_node(["n1"], state="fail", reason="Action:Replace")
    controller.cycle()
    assert published(controller)["unlisted"] == []
    del slurm._nodes["n1"]
    controller.cycle()
    (unlisted,) = published(controller)["unlisted"]
    assert (unlisted["node"], unlisted["state"]) == ("n1", "set-aside")
    assert "Slurm does not list it" in unlisted["reason"]


def test_a_pause_ends_no_alarm(sresctld: tuple[Controller, FakeSlurm, FakeClock]) -> None:
    controller, slurm, clock = sresctld
    slurm.set_node(["n1"], state="fail", reason="action:replace")
    controller.cycle()
    controller.journal.pause("a switch is changed")
    clock.pass_time(SHOWN_AFTER_SECONDS + 1)
    controller.cycle()
    (alarm,) = published(controller)["alarms"]
    assert alarm["over"] == 0.0
    controller.journal.pause("")
    slurm.set_node(["n1"], state="resume")
    controller.cycle()
    assert published(controller)["alarms"] == []


def test_a_journal_that_cannot_be_read_does_not_end_sresctld(
    sresctld: tuple[Controller, FakeSlurm, FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _, clock = sresctld
    stop = threading.Event()

    def unreadable() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def wait(event: threading.Event, seconds: float) -> bool:
        clock.pass_time(seconds)
        stop.set()
        return False

    monkeypatch.setattr(controller.journal, "pending_requeues", unreadable)
    monkeypatch.setattr(clock, "wait", wait)
    controller.run(stop)
    assert "disk I/O error" in published(controller)["blind"]
