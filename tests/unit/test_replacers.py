"""Replacers: how far Slurm has come with a node, and what may be configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.config import ReplaceSettings
from slurm_resilience.errors import ConfigError, SlurmError, SresError
from slurm_resilience.model import REBOOT, REPLACE, Node
from slurm_resilience.replace import replacers
from slurm_resilience.replace.program import THIS_HOST
from slurm_resilience.replace.repair_order import RepairOrder, Run, RunExists
from slurm_resilience.replace.repair_steps import ReachedStep
from slurm_resilience.replace.replacers import Replacers, choose_replacers
from slurm_resilience.replace.slurm_power import PowerAct, PowerStep, power_run
from slurm_resilience.replace.slurm_reboot import reboot_run

NOW = 1_000_000.0
REBOOTS = RepairOrder(Path("7-1"), "reboot", "n2", REBOOT, 600.0)
POWER = {"SuspendProgram": "/s", "ResumeProgram": "/r", "SuspendTime": "99999999 sec"}


def node(*flags: str, base: str = "DOWN", reason: str = REPLACE, boot: str = "") -> Node:
    return Node("n2", base, frozenset({"FAIL", *flags}), reason=reason, boot_time=boot)


def power(step: str, seen: Node | None, after: float = 60.0, limit: float = 600.0) -> Run:
    return power_run(ReachedStep(step, NOW - after, NOW - after), seen, NOW, limit)


@pytest.mark.parametrize(
    ("step", "seen", "state", "rc", "due"),
    [
        (PowerStep.DOWN, node("POWER_DOWN"), "running", -1, ""),
        (PowerStep.DOWN, node("POWERING_DOWN"), "running", -1, ""),
        (PowerStep.DOWN, node("POWERED_DOWN"), "running", -1, PowerAct.UP),
        (PowerStep.DOWN, node("POWERED_DOWN", "POWERING_UP"), "running", -1, ""),
        (PowerStep.DOWN, node(), "ended", 1, ""),
        (PowerStep.UP, node("POWER_UP", "POWERED_DOWN"), "running", -1, ""),
        (PowerStep.UP, node("POWERING_UP", "NOT_RESPONDING"), "running", -1, ""),
        (PowerStep.UP, node("POWERING_UP", reason=""), "running", -1, PowerAct.REASON),
        (PowerStep.UP, node(reason=""), "running", -1, PowerAct.REASON),
        (PowerStep.UP, node("NOT_RESPONDING"), "running", -1, ""),
        (PowerStep.UP, node(), "ended", 0, ""),
        (PowerStep.UP, node("POWERED_DOWN", "NOT_RESPONDING"), "ended", 1, ""),
        (PowerStep.UP, None, "running", -1, ""),
    ],
)
def test_how_far_a_power_cycle_has_come(
    step: str, seen: Node | None, state: str, rc: int, due: str
) -> None:
    run = power(step, seen)
    assert (run.state, run.rc, run.next_act) == (state, rc, due)


def test_slurm_shows_an_order_a_moment_later() -> None:
    assert power(PowerStep.DOWN, node(), after=1.0).state == "running"
    assert power(PowerStep.UP, node("POWERED_DOWN"), after=1.0).state == "running"


@pytest.mark.parametrize(
    ("step", "flag", "text"),
    [
        (PowerStep.DOWN, "POWERING_DOWN", "not done within 30 s; it is DOWN+FAIL+POWERING_DOWN"),
        (PowerStep.DOWN, "POWERED_DOWN", "not done within 30 s; half done: it is powered down"),
    ],
)
def test_a_power_cycle_that_takes_too_long(step: str, flag: str, text: str) -> None:
    run = power(step, node(flag), limit=30.0)
    assert (run.state, run.rc, run.output) == ("ended", 124, text)


@pytest.mark.parametrize(
    ("seen", "state", "rc"),
    [
        (node("REBOOT_REQUESTED", boot="2026-01-01T00:00:00"), "running", -1),
        (node("REBOOT_ISSUED", boot="2026-01-01T00:00:09"), "running", -1),
        (node(boot="2026-01-01T00:00:09"), "ended", 0),
        (node(boot="2026-01-01T00:00:01"), "ended", 1),
        (node(boot="2026-01-01T00:00:00"), "ended", 1),
        (node(boot=""), "ended", 1),
        (node(boot="2026-01-01T00:00:09", reason=f"{REBOOT} : reboot complete"), "running", -1),
        (None, "running", -1),
    ],
)
def test_how_far_a_reboot_has_come(seen: Node | None, state: str, rc: int) -> None:
    step = ReachedStep("reboot", NOW - 60, NOW - 60, "2026-01-01T00:00:00")
    run = reboot_run(step, seen, NOW, REBOOTS)
    assert (run.state, run.rc) == (state, rc)
    if seen is not None and rc == 1:
        assert reboot_run(step, seen, NOW - 59, REBOOTS).state == "running"


class Site:
    """The replacers of a configuration, on a fake Slurm."""

    def __init__(self, tmp_path: Path, raw: dict[str, str], **settings: Any) -> None:
        self.slurm = FakeSlurm(3)
        info = msgspec.structs.replace(self.slurm.info(), raw=raw)
        self.slurm.calls.clear()
        self.replacers: Replacers = choose_replacers(ReplaceSettings(**settings), info, self.slurm)
        self.order = RepairOrder(tmp_path / "7-1", "replace", "n2", REPLACE, 600.0)

    def start(self, seen: Node | None = None) -> None:
        self.replacers.start(self.order, REPLACE, seen or self.slurm.node("n2"), NOW)

    def status(self, seen: Node) -> Run:
        return self.replacers.status(self.order, seen, NOW + 60)

    @property
    def states(self) -> list[str]:
        return [call[2] for call in self.slurm.calls if call[0] == "set_node"]


def test_an_order_is_asked_of_slurm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, POWER, by="slurm-power")
    monkeypatch.setattr(site.slurm, "set_node", lambda *_, **how: site.slurm.calls.append(how))
    site.start(node())
    assert site.slurm.calls == [{"state": "power_down_force"}]
    with pytest.raises(RunExists):
        site.start(node())
    # Slurm was never reached (sresctld was killed before, say): the next try looks anew.
    assert site.status(node()).rc == 1
    assert len(site.slurm.calls) == 1


def test_a_next_try_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, POWER, by="slurm-power")
    monkeypatch.setattr(site.slurm, "set_node", lambda *_, **how: site.slurm.calls.append(how))
    for attempt, (flag, asked) in enumerate(
        (("POWERED_DOWN", [{"state": "power_up"}]), ("POWERING_DOWN", []), ("POWERING_UP", []))
    ):
        site.slurm.calls.clear()
        site.order = msgspec.structs.replace(site.order, directory=tmp_path / f"7-{attempt}")
        site.start(node(flag))
        assert site.slurm.calls == asked


def test_a_run_is_followed_by_the_replacer_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, POWER, by="slurm-power")
    monkeypatch.setattr(site.slurm, "set_node", lambda *_, **__: None)
    site.start(node())
    other = Site(tmp_path, {}, program=("/bin/true",))
    assert other.status(node("POWERED_DOWN")).next_act == PowerAct.UP
    with pytest.raises(RunExists):
        other.start(node())


def test_a_disk_that_is_full_asks_slurm_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, POWER, by="slurm-power")
    monkeypatch.setattr(THIS_HOST, "make", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(Exception, match="full"):
        site.start(node())
    assert site.states == []
    assert site.status(node()).state == "unbegun"


def test_what_slurm_adds_to_a_reason_is_taken_away(tmp_path: Path) -> None:
    site = Site(tmp_path, {"RebootProgram": "/b"})
    site.replacers.start(site.order, REBOOT, node(), NOW)
    added = node(reason=f"{REPLACE} : reboot issued : reboot complete")
    assert site.status(added).next_act
    site.replacers.go_on(site.order, added, NOW + 60)
    assert site.slurm.calls[-1] == ("set_node", ("n2",), "fail", REPLACE)
    theirs = node(reason="RMA 4711")
    assert not site.status(theirs).next_act


def test_a_reboot_that_has_not_begun_is_taken_back(tmp_path: Path) -> None:
    site = Site(tmp_path, {"RebootProgram": "/b"})
    site.replacers.start(site.order, REBOOT, site.slurm.node("n2"), NOW)
    assert "REBOOT_REQUESTED" in site.slurm.node("n2").flags
    site.replacers.stop(site.order)
    assert "REBOOT_REQUESTED" not in site.slurm.node("n2").flags
    site.replacers.stop(site.order)


@pytest.mark.parametrize(
    ("raw", "settings", "replaces", "reboots"),
    [
        ({}, {}, "", ""),
        ({}, {"program": ("/p",)}, "program", "program"),
        ({"RebootProgram": "/b"}, {"program": ("/p",)}, "program", "program"),
        ({"RebootProgram": "/b"}, {}, "", "slurm-reboot"),
        (POWER, {"by": "slurm-power"}, "slurm-power", "slurm-power"),
        (
            {**POWER, "RebootProgram": "/b"},
            {"by": "slurm-power"},
            "slurm-power",
            "slurm-reboot",
        ),
        (
            {**POWER, "RebootProgram": "/b"},
            {"by": "slurm-power", "reboot_by": "program", "program": ("/p",)},
            "slurm-power",
            "program",
        ),
    ],
)
def test_which_replacer_does_what(
    tmp_path: Path, raw: dict[str, str], settings: dict[str, Any], replaces: str, reboots: str
) -> None:
    chosen = Site(tmp_path, raw, **settings).replacers
    assert [chosen.name_of(action) * chosen.can(action) for action in (REPLACE, REBOOT)] == [
        replaces,
        reboots,
    ]


@pytest.mark.parametrize(
    ("raw", "settings", "said"),
    [
        ({}, {"by": "slurm-powr"}, "did you mean 'slurm-power'?"),
        ({}, {"by": "zzz"}, "known: program, slurm-power"),
        ({}, {"by": "slurm-power"}, "slurm-power needs a SuspendProgram in slurm.conf"),
        ({**POWER, "SuspendTime": "NONE"}, {"by": "slurm-power"}, "SuspendTime is finite"),
        ({}, {"reboot_by": "slurm-reboot"}, "needs a RebootProgram in slurm.conf"),
        ({}, {"by": "broken"}, "cannot be loaded: no such cloud"),
        ({}, {"by": "lame"}, "has no status, stop"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raw: dict[str, str],
    settings: dict[str, Any],
    said: str,
) -> None:
    points = [Point("broken", None), Point("lame", lambda _: Lame())]
    monkeypatch.setattr(replacers, "entry_points", named(points))
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as error:
        Site(tmp_path, raw, **settings)
    assert "\n" not in str(error.value)


class Point:
    """An entry point of a third party."""

    def __init__(self, name: str, make: Any) -> None:
        self.name, self.value, self._make = name, f"cloud:{name}", make

    def load(self) -> Any:
        if self._make is None:
            raise ImportError("no such cloud")
        return self._make


class Lame:
    def start(self, order: RepairOrder, node: Node, now: float) -> None: ...


class Cloud(Lame):
    """A third party's replacer."""

    def __init__(self, settings: ReplaceSettings) -> None:
        self.orders: list[str] = []

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        order.directory.mkdir()
        self.orders.append(order.node)

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        return Run("running", by="the cloud")

    def stop(self, order: RepairOrder) -> None:
        self.orders.append("stop")


def named(points: list[Point]) -> Any:
    def entry_points(group: str, name: str = "") -> list[Point]:
        assert group == "slurm_resilience.replacers"
        return [point for point in points if name in ("", point.name)]

    return entry_points


def test_a_third_partys_replacer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Cloud] = []

    def make(settings: ReplaceSettings) -> Cloud:
        made.append(Cloud(settings))
        return made[-1]

    monkeypatch.setattr(replacers, "entry_points", named([Point("cloud", make)]))
    site = Site(tmp_path, {}, by="cloud")
    site.start()
    assert site.status(node()).by == "the cloud"
    assert site.replacers.is_unfinished(site.order, node(), NOW)
    with pytest.raises(RunExists):
        site.start()
    site.replacers.stop(site.order)
    assert made[0].orders == ["n2", "stop"]
    # The package is gone after an upgrade: the run is lost, not repeated under its name.
    lost = Site(tmp_path, {}, program=("/bin/true",)).status(node())
    assert (lost.state, lost.output) == ("lost", "the replacer cloud is not installed any more")


def test_a_third_partys_defect_does_not_end_sresctld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Defective(Cloud):
        def start(self, order: RepairOrder, node: Node, now: float) -> None:
            super().start(order, node, now)
            raise KeyError("s3cret")

        def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
            raise RuntimeError("no route to the cloud")

    monkeypatch.setattr(replacers, "entry_points", named([Point("cloud", Defective)]))
    site = Site(tmp_path, {}, by="cloud")
    with pytest.raises(SresError, match="the replacer cloud failed: KeyError; see") as failed:
        site.start()
    assert "s3cret" not in str(failed.value)  # any user may read it
    # Unknown is not failed: nothing is begun beside what may run.
    runs = [site.status(node()) for _ in range(3)]
    assert {(run.state, run.by) for run in runs} == {
        ("running", "cloud, whose state cannot be read,")
    }
    assert caplog.text.count("no route to the cloud") == 1
    assert site.replacers.is_unfinished(site.order, node(), NOW)


def test_slurms_refusal_is_an_error_of_the_act(tmp_path: Path) -> None:
    site = Site(tmp_path, {"RebootProgram": "/b"})
    order = msgspec.structs.replace(site.order, node="n9")
    with pytest.raises(Exception, match="Invalid node name"):
        site.replacers.start(order, REBOOT, Node("n9", "IDLE"), NOW)
    with pytest.raises(SlurmError):
        site.slurm.cancel_reboot("n1")
