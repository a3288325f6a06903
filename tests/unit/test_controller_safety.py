"""Over many cycles: nothing irreversible on stale evidence, nothing twice, and a person first."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm
from test_controller_act import Controller, TestProber
from worlds import FakeClock, agent, config, finding

from slurm_resilience.clock import SteadyClock
from slurm_resilience.controller import actions
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import BreakerState, Fault, IncidentFacts
from slurm_resilience.controller.main import Controller as Daemon
from slurm_resilience.controller.main import only_one, only_one_of
from slurm_resilience.controller.observe import ClusterSnapshot, SiteFacts
from slurm_resilience.controller.probe import ProbeResult
from slurm_resilience.errors import SresError
from slurm_resilience.model import REPLACE
from slurm_resilience.replace import program
from slurm_resilience.replace.repair_order import Run
from slurm_resilience.wire.messages import BreakerReset, PauseRequest


class Cluster(Controller):
    """A controller whose nodes live and die as a test says, second by second."""

    def __init__(self, state_dir: Path, nodes: int = 8, **settings: dict[str, Any]) -> None:
        self.gone: dict[str, float] = {}
        """When each silent node fell silent."""
        self.back: dict[str, float] = {}
        """When each node began to beat again."""
        self.was_heard = True
        super().__init__(state_dir, nodes)
        replace = {"program": ("replace-node",), "backoff": 5.0, "silent_for": 5.0}
        self.config = config(**({"replace": replace} | settings))
        self.restart()

    def goes(self, name: str) -> None:
        self.gone.setdefault(name, self.clock.monotonic())
        self.slurm.power_off(name)

    def returns(self, name: str) -> None:
        if self.gone.pop(name, None) is not None:
            self.back[name] = self.clock.monotonic()
            self.slurm.power_on(name)

    def cycle(self) -> str:
        now = self.clock.monotonic()
        is_heard = any(node.name not in self.gone for node in self.slurm.nodes())
        if is_heard and not self.was_heard:
            self.registry.since = now
        self.was_heard = is_heard
        prober = self.prober
        assert isinstance(prober, TestProber)
        for node in self.slurm.nodes():
            name = node.name
            view = self.registry.views.get(name, agent(name))
            if name in self.gone:
                silence = now - self.gone[name] + 0.1
                prober.living.discard(name)
                if silence > self.config.detect.silent_after:
                    tried = prober.answers.get(name, ())
                    prober.answers[name] = (*tried, ProbeResult(now, now, "silent"))
                view = msgspec.structs.replace(
                    view, silence=silence, heard_at=now - silence, steady=0.0
                )
            else:
                prober.living.add(name)
                if name in prober.asked:
                    prober.answers[name] = (ProbeResult(now, now, "answered"),)
                steady = now - self.back.get(name, now - 100.0)
                view = msgspec.structs.replace(view, silence=0.1, heard_at=now, steady=steady)
            self.registry.views[name] = view
        return super().cycle()

    def run_for(self, seconds: float, step: float = 0.5) -> None:
        for _ in range(int(seconds / step)):
            self.cycle()
            self.clock.pass_time(step)

    def marked(self) -> set[str]:
        return {node.name for node in self.slurm.nodes() if node.requested_action}


class Starts:
    """Replacement runs without processes, each judged when it is started."""

    def __init__(self) -> None:
        self.runs: dict[Path, Run] = {}
        self.of_node: list[str] = []
        self.living_at_start: list[str] = []
        self.cluster: Cluster | None = None

    def start(self, directory: Path, _: object, __: str, node: str, *___: object) -> None:
        assert directory not in self.runs, "started twice"
        self.runs[directory] = Run("running")
        self.of_node.append(node)
        if self.cluster is not None and node not in self.cluster.gone:
            self.living_at_start.append(node)

    def end(self, code: int) -> None:
        for directory, run in self.runs.items():
            if run.state == "running":
                self.runs[directory] = Run("ended", code)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    known = Starts()
    monkeypatch.setattr(program, "start", known.start)
    monkeypatch.setattr(
        program, "status", lambda directory, *_, **__: known.runs.get(directory, Run("lost"))
    )
    monkeypatch.setattr(program, "stop", lambda directory, *_: known.runs.pop(directory, None))
    yield known


# -- life is looked at again ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_no_node_that_lives_is_replaced(tmp_path: Path, starts: Starts, seed: int) -> None:
    """Blips, deaths, runs that fail, restarts of sresctld: at any moment."""
    chance = random.Random(seed)
    limits = {"nodes_at_once": 50, "nodes_per_hour": 500}
    limits |= {"partition_at_once": 50, "partition_per_hour": 500}
    cluster = Cluster(tmp_path, 6, breaker=limits)
    starts.cluster = cluster
    names = [node.name for node in cluster.slurm.nodes()]
    until: dict[str, float] = {}
    for _ in range(600):
        now = cluster.clock.monotonic()
        for name in names:
            if name in cluster.gone and now >= until[name]:
                cluster.returns(name)
            elif name not in cluster.gone and chance.random() < 0.01:
                cluster.goes(name)
                until[name] = now + chance.choice((0.5, 2.0, 6.0, 12.0, 60.0, 1e9))
        if chance.random() < 0.1:
            starts.end(chance.choice((0, 1, 1)))
        if chance.random() < 0.02:
            cluster.restart()
        cluster.cycle()
        cluster.clock.pass_time(0.5)
    assert starts.living_at_start == []
    assert len(starts.of_node) >= 1
    for name in list(cluster.gone):
        cluster.returns(name)


def test_a_blip_of_six_seconds_replaces_nothing_and_ends_in_service(
    tmp_path: Path, starts: Starts
) -> None:
    cluster = Cluster(tmp_path, replace={"program": ("replace-node",)})
    cluster.goes("n3")
    cluster.run_for(6)
    assert cluster.marked() == {"n3"}
    cluster.returns("n3")
    cluster.run_for(10)
    assert starts.of_node == []
    assert cluster.slurm.node("n3").is_available
    assert cluster.events("came-back", "closed", "replacing") == ["came-back", "closed"]


def test_a_retry_looks_at_life_too(tmp_path: Path, starts: Starts) -> None:
    cluster = Cluster(tmp_path)
    cluster.goes("n3")
    cluster.run_for(10)
    starts.end(1)
    cluster.returns("n3")
    cluster.run_for(30)
    assert starts.of_node == ["n3"]
    assert cluster.slurm.node("n3").is_available


def test_a_node_that_begins_to_beat_between_decision_and_act(
    tmp_path: Path, starts: Starts
) -> None:
    cluster = Cluster(tmp_path)
    cluster.goes("n3")
    while not cluster.journal.incidents() or cluster.incident.state is not NodeState.EMPTY:
        cluster.cycle()
        cluster.clock.pass_time(0.25)
    for _ in range(4):
        cluster.slurm.before["node"] = lambda: cluster.registry.views.update(n3=agent("n3"))
        cluster.cycle()
        cluster.clock.pass_time(0.25)
    assert starts.of_node == []


def test_a_node_that_flaps_is_left_to_a_person(tmp_path: Path, starts: Starts) -> None:
    cluster = Cluster(tmp_path, replace={"program": ("replace-node",)}, breaker={"quiet": 1.0})
    for _ in range(4):
        cluster.goes("n3")
        cluster.run_for(6)
        cluster.returns("n3")
        cluster.run_for(10)
    assert cluster.journal.state_of("n3") is NodeState.QUARANTINED
    assert cluster.slurm.node("n3").is_down
    assert starts.of_node == []
    cluster.run_for(60)
    assert cluster.journal.state_of("n3") is NodeState.QUARANTINED


# -- the breaker remembers --------------------------------------------------------------------


def test_three_of_six_are_neither_marked_nor_replaced_however_long(
    tmp_path: Path, starts: Starts
) -> None:
    cluster = Cluster(tmp_path, 6)
    for name in ("n1", "n2", "n3"):
        cluster.goes(name)
    cluster.run_for(3000, step=2.0)
    assert cluster.marked() == set() and starts.of_node == []
    assert cluster.events("alarm") == ["alarm"]
    cluster.restart()
    cluster.run_for(100, step=2.0)
    assert cluster.marked() == set()
    for name in ("n1", "n2", "n3"):
        cluster.returns(name)
    cluster.run_for(700, step=2.0)
    assert not cluster.journal.breaker().is_tripped
    assert cluster.events("breaker") == ["breaker", "breaker"]


def test_a_closed_incident_makes_no_room_for_the_rest_of_a_storm(
    tmp_path: Path, starts: Starts
) -> None:
    cluster = Cluster(tmp_path, 6)
    cluster.goes("n1")
    cluster.run_for(8)
    starts.end(0)
    cluster.returns("n1")
    cluster.registry.views["n1"] = agent("n1", boot_id="boot-2")
    cluster.run_for(8)
    assert cluster.incident.state is NodeState.HEALTHY
    for name in ("n2", "n3"):
        cluster.goes(name)
    cluster.run_for(60)
    assert cluster.marked() == set()


def test_most_die_in_a_second_and_only_supervised_jobs_move(tmp_path: Path, starts: Starts) -> None:
    dead = int(os.environ.get("SRES_TEST_DEAD", "40"))
    cluster = Cluster(tmp_path, dead * 3 // 2)
    jobs = [cluster.slurm.submit(4) for _ in range(dead // 8)]
    plain = cluster.slurm.submit(4)
    first = {job_id: set(cluster.slurm.job(job_id).nodes) for job_id in (*jobs, plain)}
    for job_id in jobs:
        cluster.supervise(job_id)
    for number in range(1, dead + 1):
        cluster.goes(f"n{number}")
    cluster.run_for(120)
    # Those that are idle and dead must not be offered to the jobs that move.
    assert cluster.marked() == {f"n{i}" for i in range(1, dead + 1)} - first[plain]
    assert all(cluster.gone.keys() >= first[job_id] for job_id in (*jobs, plain))
    assert starts.of_node == []
    for job_id in jobs:
        assert not cluster.gone.keys() & set(cluster.slurm.job(job_id).nodes)
    assert cluster.slurm.job(plain).state == "RUNNING"
    # One of the breaker, and one of the nodes on which the plain job runs.
    alarms = [event["text"] for event in cluster.journal.events_after(0, ("alarm",), 100)]
    assert sorted(text.split(":")[0][:19] for text in alarms) == [
        "4 dead nodes have j",
        "the breaker tripped",
    ]


@pytest.mark.parametrize("seconds", [5, 20, 60, 400])
def test_a_cut_of_sresctlds_own_machine_ends_no_job_and_marks_no_node(
    tmp_path: Path, starts: Starts, seconds: int
) -> None:
    """No node is heard, then one after the other is."""
    cluster = Cluster(tmp_path, 8)
    jobs = [cluster.slurm.submit(4) for _ in range(2)]
    for job_id in jobs:
        cluster.supervise(job_id)
    names = [node.name for node in cluster.slurm.nodes()]
    for name in names:
        cluster.goes(name)
    cluster.run_for(seconds)
    for name in names:
        cluster.returns(name)
        cluster.run_for(0.5)
    cluster.run_for(30)
    assert [cluster.slurm.job(job_id).restarts for job_id in jobs] == [0, 0]
    assert cluster.marked() == set() and starts.of_node == []
    assert cluster.events("alarm", "detected", "marking", "breaker") == ["alarm"]


def test_a_node_that_stays_dead_after_such_a_cut_is_found(tmp_path: Path, starts: Starts) -> None:
    cluster = Cluster(tmp_path, 8)
    names = [node.name for node in cluster.slurm.nodes()]
    for name in names:
        cluster.goes(name)
    cluster.run_for(60)
    for name in names[1:]:
        cluster.returns(name)
    cluster.run_for(20)
    assert starts.of_node == ["n1"]
    assert cluster.marked() == {"n1"}


def test_the_last_node_that_is_heard_may_die_all_the_same(tmp_path: Path, starts: Starts) -> None:
    cluster = Cluster(tmp_path, 2)
    for name in ("n1", "n2"):
        cluster.goes(name)
        cluster.run_for(20)
    assert cluster.marked() == {"n1", "n2"}


def test_a_person_resets_the_breaker(tmp_path: Path, starts: Starts) -> None:
    cluster = Cluster(tmp_path, 6)
    for name in ("n1", "n2", "n3"):
        cluster.goes(name)
    cluster.run_for(10)

    class Caller:
        role = "query"
        subject = ""

        def __init__(self, uid: int) -> None:
            self.uid = uid
            self.answers: list[Any] = []

        def send(self, message: Any) -> None:
            self.answers.append(message)

    stranger, root = Caller(1000), Caller(0)
    cluster.inbox.received(stranger, BreakerReset())  # type: ignore[arg-type]
    assert "only root" in stranger.answers[0].reason
    cluster.run_for(2)
    assert cluster.marked() == set()
    cluster.inbox.received(root, BreakerReset())  # type: ignore[arg-type]
    cluster.run_for(30)
    assert cluster.marked() == {"n1", "n2", "n3"}
    assert starts.of_node == ["n1", "n2", "n3"]


# -- once -------------------------------------------------------------------------------------


def test_two_on_one_state_directory_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(SresError, match="another sresctld works in")
    with only_one(tmp_path), refused, only_one(tmp_path):
        pass
    with only_one(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(SresError, match="cannot be used"), only_one(tmp_path / "file"):
        pass


def test_one_sresctld_acts_for_a_cluster_whatever_its_state_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a copy of sres.toml that named another one, a node was replaced by both."""
    cluster, ours = tmp_path.name, frozenset({os.geteuid()})
    refused = pytest.raises(SresError, match=rf"another sresctld \(process {os.getpid()}\) acts")
    with only_one_of(cluster, ours), refused, only_one_of(cluster, ours):
        raise AssertionError
    # A user who takes the name keeps no sresctld from its work.
    with only_one_of(cluster, ours), only_one_of(cluster, frozenset({12345})):
        assert "cannot be told" in caplog.text
    with only_one_of("c" * 300, ours), only_one_of(cluster, ours):
        pass


def test_an_earlier_run_that_has_not_ended_keeps_the_next_one_from_starting(
    tmp_path: Path, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person took the node in mid-replacement, and asks anew while the program still ends."""
    cluster = Cluster(tmp_path)
    cluster.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    cluster.run_for(3)
    (first,) = starts.runs
    cluster.slurm.set_node(["n3"], state="drain", reason="RMA 4711")
    cluster.run_for(2)
    assert cluster.incident.state is NodeState.HELD
    still_ending = {first}
    monkeypatch.setattr(program, "is_unfinished", lambda directory, *_: directory in still_ending)
    cluster.slurm.now += 60
    cluster.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    cluster.run_for(5)
    assert starts.of_node == ["n3"]
    still_ending.clear()
    cluster.run_for(2)
    assert starts.of_node == ["n3", "n3"]


def test_a_node_missing_from_listings_for_a_while_is_not_replaced_twice(
    tmp_path: Path, starts: Starts
) -> None:
    cluster = Cluster(tmp_path)
    cluster.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    cluster.run_for(3)
    missing = cluster.slurm._nodes.pop("n3")
    cluster.run_for(3)
    cluster.slurm.put(missing)
    cluster.run_for(10)
    assert starts.of_node == ["n3"]
    assert cluster.incident.state is NodeState.REPAIRING


def test_the_date_may_be_set_at_any_time() -> None:
    clock = FakeClock()
    steady = SteadyClock(clock)
    before = steady.now()
    clock.pass_time(5.0)
    clock.time += 86400.0
    assert steady.now() == before + 5.0
    clock.time -= 2 * 86400.0
    clock.pass_time(1.0)
    assert steady.now() == before + 6.0
    steady.adopt()
    assert steady.now() == clock.now()
    assert not steady.wait(threading.Event(), 1.0)


def test_a_restart_goes_by_the_date_of_the_last_sresctld(tmp_path: Path) -> None:
    """The machine's date was set back by an hour, and a repair is under way."""
    clock, slurm, an_hour = FakeClock(), FakeSlurm(2), 3600.0
    journal = Journal(tmp_path / "journal.db")
    late = clock.now() + an_hour
    journal.open_incident("n1", NodeEvent.REQUESTED, "requested", REPLACE, "asked", late)
    journal.close()
    settings = config(controller={"state_dir": str(tmp_path)})
    daemon = Daemon(settings, slurm, slurm.info(), clock)  # type: ignore[arg-type]
    with contextlib.closing(daemon):
        clock.pass_time(5.0)
        assert daemon._clock.now() == late + 5.0


def test_no_ceiling_of_an_hour_forgets_when_the_date_goes_on(tmp_path: Path) -> None:
    clock, slurm = FakeClock(), FakeSlurm(2)
    settings = config(controller={"state_dir": str(tmp_path)})
    daemon = Daemon(settings, slurm, slurm.info(), clock)  # type: ignore[arg-type]
    with contextlib.closing(daemon):
        journal, before = daemon.journal, daemon._clock.now()
        journal.event(before - 4000.0, "alarm", "of no account any more")
        journal.event(before - 60.0, NodeEvent.REPLACING, "replace-node n2", node="n2")
        journal.put_fault(Fault("n2", "", (), before - 600.0, is_over=True))
        journal.put_breaker(BreakerState(reset_at=before - 900.0))
        clock.time += 7200.0
        daemon._adopt_the_date()
        now = clock.now()
        assert daemon._clock.now() == now == before + 7200.0
        assert [event["at"] for event in journal.events()] == [now - 60.0, before - 4000.0]
        assert journal.faults()["n2"].began == now - 600.0
        assert journal.breaker().reset_at == now - 900.0


def test_the_journal_goes_back_with_the_date(tmp_path: Path) -> None:
    """Else what lies in the future counts for as long: a breaker could not even be reset."""
    clock, slurm, an_hour = FakeClock(), FakeSlurm(2), 3600.0
    journal = Journal(tmp_path / "journal.db")
    late = clock.now() + an_hour
    journal.event(clock.now() - 9.0, "alarm", "written before")
    journal.event(late - 60.0, NodeEvent.REPLACING, "replace-node n2", node="n2")
    journal.event(late, "alarm", "look here")
    journal.put_fault(Fault("n2", "", (), late - 600.0, is_over=True))
    journal.put_breaker(BreakerState(reset_at=late - 900.0))
    journal.put_missing("n3", late - 30.0)
    journal.close()
    settings = config(controller={"state_dir": str(tmp_path)})
    daemon = Daemon(settings, slurm, slurm.info(), clock)  # type: ignore[arg-type]
    with contextlib.closing(daemon):
        daemon._adopt_the_date()
        now, journal = clock.now(), daemon.journal
        assert daemon._clock.now() == now
        assert [event["at"] for event in journal.events()] == [now, now - 60.0, now - 9.0]
        assert journal.faults()["n2"].began == now - 600.0
        assert journal.breaker().reset_at == now - 900.0
        assert journal.missing() == {"n3": now - 30.0}


def test_old_incidents_and_their_runs_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")

    def ended(node: str, event: NodeEvent, at: float) -> int:
        number = journal.open_incident(node, NodeEvent.DETECTED, "dead", REPLACE, "silent", at).id
        journal.apply(number, NodeEvent.MARKED, "", at)
        journal.apply(number, event, "", at, IncidentFacts(attempts=1))
        return number

    old, kept, new = (
        ended("n1", NodeEvent.RELEASED, 10.0),
        ended("n2", NodeEvent.TAKEN_OVER, 10.0),
        ended("n3", NodeEvent.RELEASED, 1000.0),
    )
    under_way = journal.open_incident("n4", NodeEvent.DETECTED, "dead", REPLACE, "", 10.0).id
    for number in (old, kept, new, under_way):
        (tmp_path / f"{number}-1").mkdir()
    journal.prune(500.0)
    program.prune(tmp_path, 1e12, journal.has_incident)
    left = {incident.id for incident in journal.incidents(open_only=False)}
    assert left == {kept, new, under_way}
    assert {path.name for path in tmp_path.glob("*-1")} == {f"{number}-1" for number in left}


# -- a person comes first ---------------------------------------------------------------------


def test_a_reason_that_stays_on_a_node_in_service_is_remembered(tmp_path: Path) -> None:
    """24.11 keeps it at a node resume; Slurm's next one is written behind it."""
    cluster = Cluster(tmp_path)
    cluster.slurm.put(msgspec.structs.replace(cluster.slurm.node("n3"), reason="bad fan"))
    cluster.run_for(2)
    snapshot = cluster.observe()
    assert isinstance(snapshot, ClusterSnapshot)
    assert {node.stale_reason for node in snapshot.nodes.values()} == {"", "bad fan"}
    cluster.slurm.put(msgspec.structs.replace(cluster.slurm.node("n3"), reason=""))
    cluster.run_for(2)
    snapshot = cluster.observe()
    assert isinstance(snapshot, ClusterSnapshot)
    assert snapshot.nodes["n3"].stale_reason == ""


def test_a_suspended_job_is_work_of_its_nodes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    job_id = cluster.slurm.submit(2)
    for nodes in ((), cluster.slurm.job(job_id).nodes):
        snapshot = cluster.observe()
        assert isinstance(snapshot, ClusterSnapshot)
        seen = [node.name for node in snapshot.nodes.values() if node.has_suspended_job]
        assert tuple(seen) == nodes
        cluster.slurm.suspend(job_id)
    cluster.slurm.put(msgspec.structs.replace(cluster.slurm.node(nodes[0]), base="DOWN"))
    snapshot = cluster.observe()
    assert isinstance(snapshot, ClusterSnapshot)
    assert not snapshot.nodes[nodes[0]].has_suspended_job


def test_nothing_more_is_done_after_a_stop_between_two_acts(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    snapshot = cluster.observe()
    assert isinstance(snapshot, ClusterSnapshot)
    halts = iter((False, True))
    cluster.actor.is_halted = lambda: next(halts)
    alarms = tuple(actions.RaiseAlarm(f"k{i}", "look") for i in range(3))
    cluster.actor.act(snapshot, (actions.ProbeNode("n1"), *alarms))
    assert cluster.events("alarm") == ["alarm"]


class Root:
    role, subject, uid = "query", "", 0

    def send(self, message: object) -> None:
        pass


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[Daemon, FakeSlurm]]:
    slurm = FakeSlurm(4)
    settings = config(controller={"state_dir": str(tmp_path)})
    controller = Daemon(settings, slurm, slurm.info(), FakeClock())  # type: ignore[arg-type]
    yield controller, slurm
    controller.close()


def test_a_pause_counts_between_two_acts(daemon: tuple[Daemon, FakeSlurm]) -> None:
    controller, slurm = daemon
    slurm.set_node(["n1", "n2"], state="fail", reason=REPLACE)
    cycle = controller._cycle
    assert not cycle.is_halted()
    controller.inbox.received(Root(), PauseRequest("stop"))  # type: ignore[arg-type]
    assert cycle.is_halted()
    assert controller.journal.paused == "stop"
    controller.inbox.received(Root(), PauseRequest(""))  # type: ignore[arg-type]
    assert not cycle.is_halted()
    cycle.stop.set()
    assert cycle.is_halted()


def test_a_pause_is_told_while_slurm_cannot_be_read(daemon: tuple[Daemon, FakeSlurm]) -> None:
    """`sres pause` waits until it is told, and `sres unpause` says what has ended."""
    controller, slurm = daemon
    slurm.unreachable = True
    for reason in ("maintenance", ""):
        controller.inbox.received(Root(), PauseRequest(reason))  # type: ignore[arg-type]
        assert "blind" in controller.cycle()
        assert controller.inbox._status.summary["paused"] == reason


def test_sight_begins_anew_after_each_time_of_blindness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slurm, seen = FakeClock(), FakeSlurm(2), list[float]()

    def look(snapshot: ClusterSnapshot, _: object) -> dict[str, object]:
        seen.append(snapshot.moment - snapshot.heard.sighted_since)
        return {}

    monkeypatch.setattr("slurm_resilience.controller.cycle.diagnose", look)
    settings = config(controller={"state_dir": str(tmp_path)})
    with contextlib.closing(Daemon(settings, slurm, slurm.info(), clock)) as controller:  # type: ignore[arg-type]
        for slurm.unreachable in (False, True, False):
            clock.pass_time(100.0)
            controller.cycle()
    assert seen == [100.0, 100.0]


def test_a_pause_of_the_last_moment_outlives_the_daemon(daemon: tuple[Daemon, FakeSlurm]) -> None:
    """`sres pause`, and at once `systemctl restart sresctld`: it must not act after its start."""
    controller, _ = daemon
    stop = threading.Event()
    stop.set()
    controller.inbox.received(Root(), PauseRequest("stop"))  # type: ignore[arg-type]
    controller.run(stop)
    assert controller.journal.paused == "stop"


def test_a_pause_that_the_disk_could_not_take_is_not_lost(
    daemon: tuple[Daemon, FakeSlurm], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, slurm = daemon
    controller.inbox.received(Root(), PauseRequest("stop"))  # type: ignore[arg-type]
    with monkeypatch.context() as full:

        def refuse(reason: str) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        full.setattr(controller.journal, "pause", refuse)
        assert "cannot be written" in controller.cycle()
        slurm.unreachable = True
        assert "cannot be written" in controller.cycle()
        slurm.unreachable = False
    assert controller.cycle() == "paused (stop): nothing is done"
    assert controller.journal.paused == "stop"


def test_slurm_does_not_put_a_marked_node_into_service_by_itself(
    tmp_path: Path, starts: Starts
) -> None:
    """ReturnToService: a node that is DOWN alone goes into service when its slurmd registers."""

    class Site(Cluster):
        def observe(self) -> Any:
            seen = super().observe()
            assert isinstance(seen, ClusterSnapshot)
            site = SiteFacts(uptime=1000.0, can_replace=True, returns_by_itself=True)
            return msgspec.structs.replace(seen, site=site)

    cluster = Site(tmp_path)
    cluster.goes("n3")
    cluster.run_for(5)
    shown = cluster.slurm.node("n3")
    assert shown.is_down and shown.is_fail and shown.reason == REPLACE
    cluster.slurm.set_node(["n4"], state="down", reason=REPLACE)
    cluster.run_for(5)
    assert cluster.slurm.node("n4").is_fail
    assert "n4" in starts.of_node


def test_a_person_who_resumes_a_sick_node_has_answered_its_finding(
    tmp_path: Path, starts: Starts
) -> None:
    cluster = Cluster(tmp_path)
    cluster.registry.views["n3"] = agent("n3", findings=(finding(code="79"),))
    cluster.run_for(1)
    assert cluster.marked() == {"n3"}
    cluster.slurm.set_node(["n3"], state="resume")
    cluster.run_for(60)
    assert cluster.marked() == set()
    assert cluster.events("released") == ["released"]
    cluster.registry.views["n3"] = agent("n3", boot_id="boot-2", findings=(finding(code="79"),))
    cluster.run_for(1)
    assert cluster.marked() == {"n3"}


def test_a_kill_right_after_marking_was_written_leaves_no_sick_node_in_service(
    tmp_path: Path, starts: Starts
) -> None:
    cluster = Cluster(tmp_path)
    cluster.registry.views["n3"] = agent("n3", findings=(finding(code="79"),))
    cluster.slurm.refusals["set_node"] = SresError("killed here")
    cluster.cycle()
    assert cluster.incident.state is NodeState.SUSPECT
    del cluster.slurm.refusals["set_node"]
    sick = cluster.registry.views["n3"]
    cluster.restart()
    cluster.registry.views["n3"] = msgspec.structs.replace(sick, findings=(), reported=False)
    cluster.cycle()
    assert cluster.incident.state is NodeState.SUSPECT
    cluster.registry.views["n3"] = sick
    cluster.cycle()
    assert cluster.slurm.node("n3").is_fail
