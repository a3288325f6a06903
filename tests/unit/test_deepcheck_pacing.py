"""Deep checks that are due: which nodes, in which order; giving way; and what killed runs leave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

from slurm_resilience.deepcheck.deep_marks import REQUESTED, status_of
from slurm_resilience.deepcheck.pacing.deep_watch import TRIED_AGAIN_SECONDS, DeepPace, DeepWatch
from slurm_resilience.deepcheck.pacing.due_nodes import (
    AGAIN_SECONDS,
    DeepTrigger,
    changed_nodes,
    due_nodes,
    used_nodes,
)
from slurm_resilience.deepcheck.pacing.left_behind import UNUSED_SECONDS, LeftBehind
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.model import Job, Node
from slurm_resilience.slurm.maintenance import read_busy, read_waiting
from slurm_resilience.slurm.reservations import Reservation

RECORDED = Path(__file__).resolve().parents[1] / "data" / "slurm"
DAY = 86400.0
NOW = 1_700_000_000.0
THEN = "2023-11-14T22:13:20Z"
"""NOW as a label has it."""
OURS = Reservation("sres-deepcheck-0123abcd", ("n1",), 0.0, "Flags=MAINT,SPEC_NODES Users=root")


def node(name: str, status: str = "", at: str = THEN, **more: Any) -> Node:
    label = f"[sres deep-check-status={status} deep-check-at={at}]" if status else ""
    return Node(name, more.pop("base", "IDLE"), comment=label, partitions=("main",), **more)


def due(
    *nodes: Node,
    wanted: Sequence[str] = (),
    changed: Sequence[str] = (),
    reserved: dict[str, str] | None = None,
    now: float = NOW,
    every: float = 7 * DAY,
) -> list[tuple[str, str]]:
    found = due_nodes(nodes, reserved or {}, wanted, changed, now, every)
    return [(one.node, one.trigger.name) for one in found]


def test_each_trigger_and_the_most_urgent_first() -> None:
    nodes = (
        node("old", "Passed"),
        node("older", "Passed", "2023-11-01T00:00:00Z"),
        node("unjudged", "Unjudged"),
        node("new"),
        node("asked", REQUESTED),
        node("updated", "Passed"),
        node("repaired", "Failed", boot_time="2023-12-01T00:00:00"),
    )
    late = NOW + 30 * DAY
    assert due(*nodes, changed=("updated",), now=late) == [
        ("asked", "REQUESTED"),
        ("repaired", "RETURNED"),
        ("new", "FIRST"),
        ("updated", "SOFTWARE"),
        ("unjudged", "AGAIN"),
        ("older", "PERIODIC"),
        ("old", "PERIODIC"),
    ]


def test_nothing_is_due_before_its_time() -> None:
    fresh = (node("a", "Passed"), node("b", "Unjudged"), node("c", "InProgress"))
    failed = node("d", "Failed", boot_time="2023-11-01T00:00:00")
    assert due(*fresh, failed, now=NOW + 60) == []
    assert due(failed, now=NOW + 365 * DAY) == [], "it has not been repaired"
    assert due(node("a", "Passed"), now=NOW + 365 * DAY, every=0) == []
    assert due(node("b", "Unjudged"), now=NOW + AGAIN_SECONDS, every=0) == [("b", "AGAIN")]


@pytest.mark.parametrize(
    "away",
    [
        node("n1", base="ALLOCATED"),
        node("n1", flags=frozenset({"DRAIN"})),
        node("n1", base="DOWN"),
        node("n1", flags=frozenset({"NOT_RESPONDING"})),
    ],
)
def test_only_idle_nodes_in_service_are_taken(away: Node) -> None:
    assert due(node("n1")) == [("n1", "FIRST")]
    assert due(away) == []
    assert due(node("n1"), reserved={"n1": "upgrade"}) == []
    assert due(node("n1"), wanted=("main",)) == [], "a job may want it"
    assert due(node("n1"), wanted=("other",)) == [("n1", "FIRST")]
    mended = msgspec.structs.replace(node("n1"), comment="[sres health-status=validating]")
    assert due(mended) == [], "its incident is sresctld's"


def test_a_node_that_has_run_jobs_is_checked_again_at_the_sites_pace() -> None:
    marked = node("n1", "Passed")

    def used(busy_until: float, now: float) -> frozenset[str]:
        return used_nodes([marked], {"n1": busy_until}, now, 3600.0)

    assert used(NOW + 600, NOW + 3600) == {"n1"}
    assert used(NOW + 600, NOW + 3599) == frozenset(), "it was checked a moment ago"
    assert used(NOW + 60, NOW + 9999) == frozenset(), "that was the check itself"
    assert used_nodes([marked], {}, NOW + 9999, 3600.0) == frozenset()
    found = due_nodes([marked], {}, (), (), NOW + 3600, 0.0, {"n1"})
    assert [one.trigger for one in found] == [DeepTrigger.USED]


def test_when_a_node_was_last_busy() -> None:
    text = (
        "NodeName=n1 State=IDLE LastBusyTime=2023-11-14T22:13:20 Comment=LastBusyTime=x\n"
        "NodeName=n2 State=IDLE LastBusyTime=Unknown Reason=x\nNodeName=n3 State=IDLE\n"
    )
    assert set(read_busy(text)) == {"n1"}
    for file in sorted(RECORDED.glob("*/nodes.txt")):
        lines = file.read_text("utf-8")
        assert len(read_busy(lines)) == lines.count("NodeName="), file


def test_jobs_that_wait_for_nodes_are_told_from_others() -> None:
    text = (
        "main|Resources\ndebug,big|Priority\nheld|JobHeldUser\nlater|BeginTime\n"
        "bound|Dependency\nlimited|QOSMaxCpuPerUserLimit\nfull|ReqNodeNotAvail, UnavailableNodes\n"
    )
    assert read_waiting(text) == {"main", "debug", "big", "full"}
    assert read_waiting("") == frozenset()


def test_changed_software_is_a_finding_of_the_node() -> None:
    other, own = {"check": "disk"}, {"check": "software"}
    nodes = {"n1": {"findings": [other]}, "n2": {"findings": [other, own]}, "n3": {}}
    assert changed_nodes({"nodes": nodes}) == {"n2"}
    assert changed_nodes({}) == frozenset()


def test_what_is_not_ours_or_in_use_is_never_removed() -> None:
    left = LeftBehind()
    others = (
        Reservation("upgrade", ("n2",), 0.0, "Flags=MAINT,SPEC_NODES Users=root"),
        Reservation(
            "sres-deepcheck-of-a-person", ("n3",), 0.0, "Flags=MAINT,SPEC_NODES Users=root"
        ),
        Reservation("sres-deepcheck-0123abce", ("n4",), 0.0, "Flags=DAILY"),
    )
    for moment in (0.0, 1000.0):
        assert left.reservations((*others,), (), moment) == ()
        assert left.reservations((OURS,), {OURS.name}, moment) == ()
    assert left.reservations((OURS,), (), 2000.0) == (), "its last job has just ended"
    assert left.reservations((OURS,), {OURS.name}, 2100.0) == ()
    assert left.reservations((OURS,), (), 2110.0) == ()
    assert left.reservations((OURS,), (), 2110.0 + UNUSED_SECONDS) == (OURS,)


class Run:
    """A process of `sres deepcheck run`."""

    def __init__(self, nodes: Sequence[str], what: str = "run") -> None:
        self.nodes = tuple(nodes)
        self.what = what
        self.code: int | None = None
        self.terminated = 0

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.terminated += 1

    def wait(self, seconds: float) -> int:
        return 0


class Cluster:
    """Slurm, and the runs that the watch begins."""

    def __init__(self, *nodes: Node, speed_seconds: float = 0.0, job_seconds: float = 0.0) -> None:
        self.busy: dict[str, float] = {}
        self.shown = {one.name: one for one in nodes}
        self.jobs_there: tuple[Job, ...] = ()
        self.reserved: list[Reservation] = []
        self.wanted: frozenset[str] = frozenset()
        self.runs: list[Run] = []
        self.told: list[str] = []
        self.at = NOW
        self.is_away = False
        pace = DeepPace(7 * DAY, 2, 60, None, job_seconds, speed_seconds)
        clock: Any = self
        begin: Any = self._begin
        self.watch = DeepWatch(self, clock, pace, begin, frozenset, self.told.append)

    def now(self) -> float:
        return self.at

    monotonic = now

    def wait(self, event: Event, seconds: float) -> bool:
        self.at += seconds
        return False

    def _begin(self, what: str, names: Sequence[str]) -> Run:
        self.runs.append(Run(names, what))
        return self.runs[-1]

    def nodes(self) -> tuple[Node, ...]:
        if self.is_away:
            raise SlurmUnreachable("no answer")
        return tuple(self.shown.values())

    def jobs(self) -> tuple[Job, ...]:
        return self.jobs_there

    def reservations(self) -> tuple[Reservation, ...]:
        return tuple(self.reserved)

    def waiting_partitions(self) -> frozenset[str]:
        return self.wanted

    def busy_until(self) -> dict[str, float]:
        return self.busy

    def release(self, name: str) -> None:
        self.reserved = [one for one in self.reserved if one.name != name]

    def set_comment(self, names: Sequence[str], comment: str) -> None:
        for name in names:
            self.shown[name] = msgspec.structs.replace(self.shown[name], comment=comment)


def test_no_more_than_its_number_is_checked_at_once() -> None:
    cluster = Cluster(*(node(f"n{number}") for number in range(1, 6)))
    for _ in range(5):
        cluster.watch.look()
    assert [run.nodes for run in cluster.runs] == [("n1", "n2")]
    cluster.runs[0].code = 0
    cluster.watch.look()
    cluster.watch.look()
    assert [run.nodes for run in cluster.runs] == [("n1", "n2"), ("n3", "n4")]


def test_a_node_that_is_always_skipped_is_not_tried_all_the_time() -> None:
    cluster = Cluster(node("n1"))
    cluster.watch.look()
    cluster.runs[0].code = 12
    for _ in range(10):
        cluster.at += 60
        cluster.watch.look()
    assert len(cluster.runs) == 1
    cluster.at += TRIED_AGAIN_SECONDS
    cluster.watch.look()
    assert len(cluster.runs) == 2


def test_after_failures_in_a_row_a_person_must_look() -> None:
    cluster = Cluster(*(node(f"n{number}") for number in range(1, 20)))
    for _ in range(20):
        cluster.watch.look()
        for run in cluster.runs:
            run.code = 11
    assert len(cluster.runs) == 3
    (told,) = [line for line in cluster.told if "may be at fault" in line]
    assert told.startswith("3 runs in a row have failed")


def test_a_run_gives_way_to_jobs_once() -> None:
    cluster = Cluster(node("n1"))
    cluster.watch.look()
    cluster.wanted = frozenset({"other"})
    cluster.watch.look()
    (run,) = cluster.runs
    assert run.terminated == 0
    cluster.wanted = frozenset({"main"})
    cluster.watch.look()
    cluster.watch.look()
    assert run.terminated == 1
    run.code = 130
    cluster.watch.look()
    assert not cluster.watch.is_running and len(cluster.runs) == 1


def test_speeds_are_measured_on_all_idle_nodes_when_nothing_else_is_due() -> None:
    busy = node("n3", "Passed", base="ALLOCATED")
    cluster = Cluster(node("n1", "Passed"), node("n2", "Passed"), busy, speed_seconds=3600.0)
    for _ in range(3):
        cluster.watch.look()
        for run in cluster.runs:
            run.code = 0
    assert [(run.what, run.nodes) for run in cluster.runs] == [("speed", ("n1", "n2"))]
    cluster.wanted = frozenset({"main"})
    cluster.at += 3600
    cluster.watch.look()
    assert len(cluster.runs) == 1, "a job waits for these nodes"
    cluster.wanted = frozenset()
    cluster.watch.look()
    assert len(cluster.runs) == 2


def test_after_its_jobs_a_node_is_checked_where_the_site_asks_for_it() -> None:
    for job_seconds, runs in ((0.0, 0), (3600.0, 1)):
        cluster = Cluster(node("n1", "Passed"), job_seconds=job_seconds)
        cluster.busy = {"n1": NOW + 3000}
        cluster.at += 3600
        cluster.watch.look()
        assert len(cluster.runs) == runs, cluster.told


def test_while_slurm_is_away_nothing_is_done() -> None:
    cluster = Cluster(node("n1"))
    cluster.is_away = True
    cluster.watch.look()
    assert cluster.runs == []
    assert cluster.told == ["nothing is done now: no answer"]


def test_what_a_killed_run_left_is_cleared_up() -> None:
    cluster = Cluster(node("n1", "InProgress"), node("n2", "Passed"))
    cluster.reserved = [OURS]
    cluster.watch.look()
    assert cluster.reserved == [OURS]
    cluster.at += UNUSED_SECONDS
    cluster.watch.look()
    assert cluster.reserved == []
    assert "sres-deepcheck-0123abcd of n1 was left behind, and is removed" in cluster.told
    assert status_of(cluster.shown["n1"]) == "Unjudged", "the run that had it is gone"
    assert status_of(cluster.shown["n2"]) == "Passed"


def test_a_label_without_a_reservation_is_given_the_same_time() -> None:
    cluster = Cluster(node("n1", "InProgress"))
    cluster.watch.look()
    cluster.at += UNUSED_SECONDS - 1
    cluster.watch.look()
    assert status_of(cluster.shown["n1"]) == "InProgress", "its run may only have ended"
    cluster.at += 1
    cluster.watch.look()
    assert status_of(cluster.shown["n1"]) == "Unjudged"


def test_every_trigger_has_its_words() -> None:
    assert len({trigger.value for trigger in DeepTrigger}) == len(DeepTrigger)
