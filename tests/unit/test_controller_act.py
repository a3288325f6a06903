"""Act: what is decided is done once, journaled before and after, and looked at again before."""

from __future__ import annotations

import gc
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm
from worlds import CONFIG, FakeClock, agent, config, finding

from slurm_resilience.controller import actions, observe
from slurm_resilience.controller.act import jobs
from slurm_resilience.controller.act.actor import Actor
from slurm_resilience.controller.calm.agent_views import AgentView
from slurm_resilience.controller.decide.decision import decide
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.controller.inbox import Inbox
from slurm_resilience.controller.job_lookups import JobLookups
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import IncidentFacts, PendingRequeue, Supervised
from slurm_resilience.controller.observe import Blind, ClusterSnapshot, SiteFacts, Sources
from slurm_resilience.controller.probe import Answer, Prober, ProbeResult
from slurm_resilience.controller.registry import Registry, SupervisorRoll
from slurm_resilience.errors import SlurmError
from slurm_resilience.model import REBOOT, REPLACE, RESET, Node
from slurm_resilience.replace import program
from slurm_resilience.replace.repair_order import Run
from slurm_resilience.wire.messages import Evidence, Message


class Peer:
    """A supervisor's connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [
            (v.node, v.verdict) for m in self.sent if isinstance(m, Evidence) for v in m.verdicts
        ]


class TestRegistry(Registry):
    """A registry whose agents and supervisors a test sets."""

    __test__ = False

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)  # type: ignore[arg-type]
        self.views: dict[str, AgentView] = {}
        self.peers: dict[int, list[Any]] = {}
        self.since = 0.0

    def hearing_since(self) -> float:
        return self.since

    def agents(self) -> dict[str, AgentView]:
        return self.views

    def agent(self, node: str) -> AgentView | None:
        return self.views.get(node)

    def supervisors(self, job: int) -> list[Any]:
        return self.peers.get(job, [])


class TestProber(Prober):
    """Probes that a test answers."""

    __test__ = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.asked: list[str] = []
        self.answers: dict[str, tuple[ProbeResult, ...]] = {}
        self.living: set[str] = set()

    def request(
        self, node: str, address: str, port: int, since: float, is_urgent: bool = False
    ) -> None:
        self.asked.append(node)
        if is_urgent:
            self._try(node)

    def look(self, node: str, address: str, port: int) -> Answer | None:
        return self._try(node)

    def _try(self, node: str) -> Answer:
        now = self.clock.monotonic()
        answer: Answer = "answered" if node in self.living else "silent"
        self.answers[node] = (*self.answers.get(node, ()), ProbeResult(now, now, answer))
        return answer

    def results(self) -> dict[str, tuple[ProbeResult, ...]]:
        return self.answers

    def forget(self, node: str) -> None:
        self.answers.pop(node, None)


class Controller:
    """The five steps on a fake Slurm, with a journal on disk. `restart` is a crash."""

    def __init__(self, state_dir: Path, nodes: int = 8, **how: Any) -> None:
        self.state_dir, self.clock = state_dir, FakeClock()
        self.slurm = FakeSlurm(nodes)
        self.config = config(
            replace={"program": ("replace-node",), "backoff": 5.0, "silent_for": 5.0}
        )
        self.how = how
        self.start()

    def start(self) -> None:
        self.journal = Journal(self.state_dir / "journal.db")
        self.registry, self.prober = TestRegistry(self.clock), TestProber(self.clock)
        self.everybody_beats()
        self.inbox = Inbox(
            self.registry,
            trusted_uids=frozenset({0}),
            lookups=JobLookups(self.slurm.job, self.clock),  # type: ignore[arg-type]
            history=lambda _: ({}, ""),
            clock=self.clock,  # type: ignore[arg-type]
        )
        self.roll = SupervisorRoll()
        self.actor = Actor(
            self.slurm,
            self.journal,
            self.registry,
            self.prober,
            self.clock,
            self.config,
            self.state_dir,
            **self.how,
        )

    def restart(self) -> None:
        self.journal.close()
        peers, views, answers = self.registry.peers, self.registry.views, self.prober.answers
        self.start()
        self.registry.peers, self.registry.views, self.prober.answers = peers, views, answers

    def everybody_beats(self) -> None:
        heard_at = self.clock.monotonic()
        self.registry.views = {
            node.name: msgspec.structs.replace(agent(node.name), heard_at=heard_at)
            for node in self.slurm.nodes()
        }

    def is_dead(self, name: str) -> None:
        now = self.clock.monotonic()
        self.slurm.power_off(name)
        silent = agent(name, connected=False)
        self.registry.views[name] = msgspec.structs.replace(silent, silence=6.0, heard_at=now - 6.0)
        self.prober.answers[name] = tuple(
            ProbeResult(now - a, now - a + 0.1, "silent") for a in (2, 1)
        )

    def comes_back(self, name: str) -> None:
        now = self.clock.monotonic()
        self.slurm.power_on(name)
        self.registry.views[name] = agent(name, boot_id="boot-2")
        self.prober.answers[name] = (ProbeResult(now, now, "answered"),)

    def observe(self) -> ClusterSnapshot | Blind:
        sources = Sources(
            self.slurm,
            self.registry,
            self.roll,
            self.inbox,
            self.prober,
            self.journal,
            self.clock,  # type: ignore[arg-type]
            self.state_dir,
        )
        site = SiteFacts(uptime=1000.0, can_replace=True, permits_expansion=True)
        return observe.observe(sources, site)

    def cycle(self) -> str:
        world = self.observe()
        assert isinstance(world, ClusterSnapshot), world
        said = decide(world, diagnose(world, self.config), self.config)
        self.actor.act(said.snapshot, said.actions, said.notes)
        return said.sentence

    def supervise(self, job_id: int) -> Peer:
        nodes = self.slurm.job(job_id).nodes
        self.journal.put_supervised(Supervised(job_id, 1000, 1, nodes, self.clock.now()))
        peer = Peer()
        self.registry.peers.setdefault(job_id, []).append(peer)
        return peer

    def events(self, *kinds: str) -> list[str]:
        """Their kinds, but for the labels, which follow each change of the state."""
        found = [event["kind"] for event in reversed(self.journal.events())]
        return [kind for kind in found if (kind in kinds if kinds else kind != "labelled")]

    def labels(self) -> list[str]:
        return [e["text"] for e in reversed(self.journal.events()) if e["kind"] == "labelled"]

    @property
    def incident(self) -> Any:
        (found,) = self.journal.incidents(open_only=False)
        return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Run]:
    """Replacement runs without processes: what the test puts in is their end."""
    known: dict[Path, Run] = {}

    def start(directory: Path, *_: object) -> None:
        if directory in known:
            raise program.RunExists("started before")
        known[directory] = Run("running")

    monkeypatch.setattr(program, "start", start)
    monkeypatch.setattr(
        program, "status", lambda directory, *_, **__: known.get(directory, Run("lost"))
    )
    monkeypatch.setattr(program, "stop", lambda directory, host: known.pop(directory))
    return known


@pytest.fixture
def sresctld(tmp_path: Path) -> Controller:
    return Controller(tmp_path)


# -- a whole life -----------------------------------------------------------------------------


def test_from_death_to_service(sresctld: Controller, runs: dict[Path, Run]) -> None:
    job_id = sresctld.slurm.submit(3)
    peer = sresctld.supervise(job_id)
    sresctld.is_dead("n3")
    sresctld.cycle()
    # FAIL before the node leaves the job: no other job may be started on it meanwhile.
    changes = ["set_node", "shrink", "set_node", "set_comment"]
    assert [call[0] for call in sresctld.slurm.calls] == changes
    assert sresctld.slurm.calls[0][2] == "fail"
    assert sresctld.slurm.job(job_id).nodes == ("n1", "n2")
    assert sresctld.slurm.node("n3").requested_action == REPLACE
    assert peer.told == [("n3", "dead")]
    sresctld.cycle()
    (run,) = runs
    for _ in range(3):
        sresctld.cycle()
    assert list(runs) == [run]
    runs[run] = Run("ended", 0, "", sresctld.clock.now())
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.VALIDATING
    sresctld.clock.pass_time(1)
    sresctld.cycle()
    sresctld.comes_back("n3")
    sresctld.cycle()
    assert sresctld.slurm.node("n3").is_available
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.HEALTHY
    assert sresctld.cycle() == "8 nodes: nothing to do"
    assert [text.split(" fault-")[0] for text in sresctld.labels()] == [
        "[sres health-status=pending-replacement",
        "[sres health-status=validating",
        "its labels are taken off",
    ]
    assert sresctld.slurm.node("n3").comment == ""
    assert sresctld.journal.events(limit=1)[0]["kind"] == "closed"
    assert sresctld.events() == [
        "detected",
        "marking",
        "taken-out",
        "marked",
        "emptied",
        "replacing",
        "replaced",
        "resuming",
        "resumed",
        "closed",
    ]
    assert peer.told == [("n3", "dead")]


def test_the_same_with_a_crash_after_each_step(tmp_path: Path, runs: dict[Path, Run]) -> None:
    """Go on after a crash at any step, and do nothing twice."""
    sresctld = Controller(tmp_path)
    job_id = sresctld.slurm.submit(3)
    sresctld.supervise(job_id)
    sresctld.is_dead("n3")
    for step in range(12):
        sresctld.restart()
        sresctld.cycle()
        sresctld.clock.pass_time(1)
        if step == 4:
            (run,) = runs
            runs[run] = Run("ended", 0, "", sresctld.clock.now())
        if step == 7:
            sresctld.comes_back("n3")
        elif step < 7:
            sresctld.is_dead("n3")
    assert sresctld.incident.state is NodeState.HEALTHY
    assert len(runs) == 1
    changes = [call[0] for call in sresctld.slurm.calls if call[0] != "set_comment"]
    assert changes == ["set_node", "shrink", "set_node", "set_node"]


def test_a_stopped_run_that_does_not_end_is_seen_after_hours(
    sresctld: Controller, runs: dict[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `sres status` has its node replaced in 0 s, and the log a line for each look."""
    sresctld.is_dead("n3")
    for _ in range(2):
        sresctld.cycle()
    (stopped,) = runs
    sresctld.slurm.set_node(["n3"], state="resume")
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.HEALTHY
    monkeypatch.setattr(program, "is_unfinished", lambda directory, _: directory == stopped)
    sresctld.clock.pass_time(7200.0)
    sresctld.everybody_beats()
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    for _ in range(3):
        sresctld.cycle()
    assert sresctld.journal.state_of("n3") is NodeState.EMPTY
    seen = sresctld.observe()
    assert isinstance(seen, ClusterSnapshot) and seen.repairs.stopped == {"n3"}
    assert not runs


def test_a_node_that_beats_again_before_its_mark_is_left_alone(sresctld: Controller) -> None:
    sresctld.is_dead("n3")
    seen = sresctld.observe()
    assert isinstance(seen, ClusterSnapshot)
    said = decide(seen, diagnose(seen, sresctld.config), sresctld.config)
    sresctld.registry.views["n3"] = agent("n3")
    sresctld.actor.act(said.snapshot, said.actions, said.notes)
    assert sresctld.slurm.calls == []
    assert sresctld.events("detected") == []


def test_a_node_that_reports_a_fault_before_its_resume_is_not_resumed(
    sresctld: Controller, runs: dict[Path, Run]
) -> None:
    sresctld.is_dead("n3")
    for _ in range(2):
        sresctld.cycle()
    (run,) = runs
    runs[run] = Run("ended", 0, "", sresctld.clock.now())
    sresctld.cycle()
    sresctld.clock.pass_time(1)
    sresctld.comes_back("n3")
    seen = sresctld.observe()
    assert isinstance(seen, ClusterSnapshot)
    said = decide(seen, diagnose(seen, sresctld.config), sresctld.config)
    assert any(isinstance(action, actions.ReturnNode) for action in said.actions)
    # Its sresd was started anew in between, and has not looked yet.
    sresctld.registry.views["n3"] = agent("n3", boot_id="boot-2", checked=False)
    sresctld.actor.act(said.snapshot, said.actions, said.notes)
    assert not sresctld.slurm.node("n3").is_available
    sick = agent("n3", boot_id="boot-2", findings=(finding(),))
    sresctld.registry.views["n3"] = sick
    sresctld.actor.act(said.snapshot, said.actions, said.notes)
    assert not sresctld.slurm.node("n3").is_available
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.EMPTY


def test_a_node_that_answers_a_probe_as_it_is_marked_is_not_set_down(sresctld: Controller) -> None:
    """Its sresd does not beat yet; the look is begun with the mark, and nothing waits for it."""
    sresctld.is_dead("n3")
    sresctld.prober.living.add("n3")
    sresctld.cycle()
    assert sresctld.slurm.node("n3").is_available
    assert sresctld.prober.answers["n3"][-1].answer == "answered"


def test_a_person_who_resumes_a_node_during_the_last_look_is_heard(
    sresctld: Controller, runs: dict[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    sresctld.is_dead("n3")
    sresctld.cycle()

    def look(node: str, *_: object) -> Answer:
        sresctld.slurm.set_node([node], state="resume")
        return "silent"

    monkeypatch.setattr(sresctld.prober, "look", look)
    sresctld.clock.pass_time(1.1)
    sresctld.cycle()
    assert sresctld.slurm.node("n3").reason == ""
    assert runs == {}


def test_a_node_that_comes_back_while_slurmctld_takes_its_time_is_not_replaced(
    sresctld: Controller, runs: dict[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    sresctld.is_dead("n3")
    sresctld.cycle()
    looks: list[str] = []
    ask_slurm = sresctld.slurm.node

    def look(node: str, *_: object) -> Answer:
        looks.append(node)
        return "silent" if len(looks) == 1 else "answered"

    def answer_late(name: str) -> Node:
        if looks:
            sresctld.clock.pass_time(10.0)
        return ask_slurm(name)

    monkeypatch.setattr(sresctld.prober, "look", look)
    monkeypatch.setattr(sresctld.slurm, "node", answer_late)
    sresctld.clock.pass_time(1.5)
    sresctld.cycle()
    assert looks == ["n3", "n3"]
    assert runs == {} and "replacing" not in sresctld.events()


def test_a_node_that_does_not_come_back_after_its_resume_is_kept_out(
    sresctld: Controller, runs: dict[Path, Run]
) -> None:
    """Else it is taken for resumed by a person, and its next findings for answered."""
    sresctld.is_dead("n3")
    sresctld.cycle()
    sresctld.cycle()
    (run,) = runs
    runs[run] = Run("ended", 0, "", sresctld.clock.now())
    sresctld.cycle()
    sresctld.clock.pass_time(1)
    sresctld.comes_back("n3")
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.RETURNING
    sresctld.is_dead("n3")
    node = sresctld.slurm.node("n3")
    sresctld.slurm.put(msgspec.structs.replace(node, flags=node.flags | {"NOT_RESPONDING"}))
    sresctld.clock.pass_time(sresctld.config.replace.return_timeout + 1)
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.EMPTY
    assert sresctld.slurm.node("n3").requested_action == REPLACE
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.EMPTY
    assert sresctld.events("released") == []


def test_a_node_that_a_person_reserves_while_it_returns_is_left_as_it_is(
    sresctld: Controller, runs: dict[Path, Run]
) -> None:
    """Its reservation makes it unavailable, and it has come back all the same."""
    sresctld.is_dead("n3")
    sresctld.cycle()
    sresctld.cycle()
    (run,) = runs
    runs[run] = Run("ended", 0, "", sresctld.clock.now())
    sresctld.cycle()
    sresctld.clock.pass_time(1)
    sresctld.comes_back("n3")
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.RETURNING
    node = sresctld.slurm.node("n3")
    sresctld.slurm.put(msgspec.structs.replace(node, flags=node.flags | {"MAINTENANCE"}))
    for _ in range(3):
        sresctld.clock.pass_time(sresctld.config.replace.return_timeout + 1)
        sresctld.comes_back("n3")
        sresctld.cycle()
    assert sresctld.slurm.node("n3").requested_action == ""
    assert len(runs) == 1
    assert sresctld.incident.ended_by is NodeEvent.CLOSED
    assert "released" not in sresctld.events()


def test_a_crash_between_shrink_and_mark(sresctld: Controller, runs: dict[Path, Run]) -> None:
    job_id = sresctld.slurm.submit(3)
    sresctld.supervise(job_id)
    sresctld.is_dead("n3")
    sresctld.slurm.refusals["set_node"] = SlurmError("slurmctld hiccups")
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.SUSPECT
    assert "failed" in sresctld.events()
    sresctld.restart()
    del sresctld.slurm.refusals["set_node"]
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.SET_ASIDE
    assert sresctld.slurm.node("n3").is_down
    assert [call[0] for call in sresctld.slurm.calls].count("shrink") == 1


@pytest.mark.parametrize("last", ["marking", "taken-out"])
def test_a_disk_that_fills_between_shrink_and_mark_keeps_no_job_waiting(
    sresctld: Controller, runs: dict[Path, Run], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Nothing is done any more until there is room: the job's supervisor must know by then."""
    job_id = sresctld.slurm.submit(3)
    peer = sresctld.supervise(job_id)
    sresctld.is_dead("n3")
    with monkeypatch.context() as full:
        written: list[str] = []
        event = sresctld.journal.event

        def write(at: float, kind: str, text: str, **more: Any) -> None:
            if last in written:
                raise sqlite3.OperationalError("database or disk is full")
            event(at, kind, text, **more)
            written.append(kind)

        def apply(*_: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        full.setattr(sresctld.journal, "event", write)
        full.setattr(sresctld.journal, "apply", apply)
        with pytest.raises(sqlite3.Error):
            sresctld.cycle()
    assert sresctld.slurm.job(job_id).nodes == ("n1", "n2")
    assert peer.told == [("n3", "dead")]
    sresctld.cycle()
    assert sresctld.slurm.node("n3").requested_action == REPLACE
    assert sresctld.incident.state.waits_for_repair
    assert [call[0] for call in sresctld.slurm.calls].count("shrink") == 1


def test_a_crash_between_slurms_mark_and_ours(sresctld: Controller, runs: dict[Path, Run]) -> None:
    sresctld.is_dead("n3")
    sresctld.journal.open_incident(
        "n3", NodeEvent.DETECTED, "dead", REPLACE, "silent", sresctld.clock.now()
    )
    sresctld.slurm.set_node(["n3"], state="down", reason=REPLACE)
    sresctld.restart()
    sresctld.cycle()
    assert sresctld.incident.state.waits_for_repair
    assert [call[0] for call in sresctld.slurm.calls] == ["set_node", "set_comment"]


def test_a_crash_between_our_note_of_a_run_and_its_start(
    sresctld: Controller, runs: dict[Path, Run]
) -> None:
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    sresctld.cycle()
    number, now = sresctld.incident.id, sresctld.clock.now()
    sresctld.journal.apply(number, NodeEvent.EMPTIED, "", now)
    sresctld.journal.apply(number, NodeEvent.REPLACING, "", now, IncidentFacts(attempts=1))
    sresctld.restart()
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.EMPTY
    sresctld.clock.pass_time(6)
    sresctld.cycle()
    assert (sresctld.incident.attempts, len(runs)) == (2, 1)


def test_a_program_that_always_fails_ends_with_a_person(
    sresctld: Controller, runs: dict[Path, Run]
) -> None:
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    for _ in range(40):
        sresctld.cycle()
        for run in runs:
            runs[run] = Run("ended", 1, "no spare")
        sresctld.clock.pass_time(5)
    assert len(runs) == sresctld.config.replace.attempts
    assert sresctld.incident.state is NodeState.QUARANTINED
    sresctld.slurm.now += 60
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    sresctld.cycle()
    assert len(sresctld.journal.incidents()) == 1


# -- looked at again before -------------------------------------------------------------------


def test_a_person_who_was_faster_is_not_overridden(sresctld: Controller) -> None:
    sresctld.is_dead("n3")

    def administrator() -> None:
        sresctld.slurm.set_node(["n3"], state="drain", reason="I look at it")

    sresctld.slurm.before["node"] = administrator
    sresctld.cycle()
    assert sresctld.slurm.node("n3").reason == "I look at it"
    assert not sresctld.slurm.node("n3").is_down
    assert sresctld.journal.incidents() == []


def test_a_person_who_drains_a_node_before_its_resume_keeps_it(
    sresctld: Controller, runs: dict[Path, Run]
) -> None:
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    sresctld.cycle()
    sresctld.cycle()
    (run,) = runs
    runs[run] = Run("ended", 0, "", sresctld.clock.now())
    sresctld.cycle()
    sresctld.clock.pass_time(1)
    sresctld.comes_back("n3")

    def administrator() -> None:
        sresctld.slurm.set_node(["n3"], state="drain", reason="I look at it")

    sresctld.slurm.before["node"] = administrator
    sresctld.cycle()
    assert sresctld.slurm.node("n3").reason == "I look at it"
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.HELD
    assert "resuming" not in sresctld.events()


def test_an_administrators_reason_survives_our_down(sresctld: Controller) -> None:
    sresctld.supervise(sresctld.slurm.submit(3))
    sresctld.slurm.set_node(["n3"], state="drain", reason="new disk")
    sresctld.is_dead("n3")
    sresctld.cycle()
    node = sresctld.slurm.node("n3")
    assert (node.is_down, node.reason) == (True, "new disk")
    assert sresctld.journal.incidents() == []


def test_a_job_that_was_requeued_meanwhile_is_not_shrunk(sresctld: Controller) -> None:
    job_id = sresctld.slurm.submit(3)
    sresctld.supervise(job_id)
    sresctld.is_dead("n3")

    def requeued() -> None:
        sresctld.slurm.power_on("n3")
        sresctld.slurm.requeue(job_id)
        sresctld.slurm.pass_time()

    sresctld.slurm.before["job"] = requeued
    sresctld.cycle()
    assert "shrink" not in [call[0] for call in sresctld.slurm.calls]


def test_nodes_that_die_together_are_marked_and_told_of_together(sresctld: Controller) -> None:
    """Both leave the job in the one change that goes with the first mark."""
    job_id = sresctld.slurm.submit(4)
    peer = sresctld.supervise(job_id)
    for name in ("n2", "n4"):
        sresctld.is_dead(name)
    sresctld.cycle()
    assert sresctld.slurm.job(job_id).nodes == ("n1", "n3")
    assert [name for name in ("n2", "n4") if not sresctld.slurm.node(name).is_down] == []
    assert sorted(peer.told) == [("n2", "dead"), ("n4", "dead")]
    assert sresctld.events("taken-out") == ["taken-out"] * 2


@pytest.mark.parametrize("change", ["drain", "reason"])
def test_a_node_that_changes_while_it_leaves_a_job_with_others_is_looked_at_anew(
    sresctld: Controller, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    slurm = sresctld.slurm
    job_id = slurm.submit(4)
    peer = sresctld.supervise(job_id)
    for name in ("n2", "n4"):
        sresctld.is_dead(name)
    shrink = slurm.shrink

    def shrink_and_change(job: int, keep: Any) -> None:
        shrink(job, keep)
        if change == "drain":
            slurm.set_node(["n4"], state="drain", reason="mine")
        else:
            slurm.put(msgspec.structs.replace(slurm.node("n4"), reason="new"))

    monkeypatch.setattr(slurm, "shrink", shrink_and_change)
    sresctld.cycle()
    assert slurm.node("n2").is_down
    assert not slurm.node("n4").is_down
    assert peer.told == [("n2", "dead")]


def test_a_shrink_that_slurm_refuses_becomes_a_requeue(sresctld: Controller) -> None:
    job_id = sresctld.slurm.submit(3)
    sresctld.supervise(job_id)
    sresctld.is_dead("n3")
    sresctld.slurm.refusals["shrink"] = SlurmError("the DB index is being set")
    sresctld.cycle()
    assert sresctld.slurm.node("n3").is_down
    assert list(sresctld.journal.pending_requeues()) == [job_id]
    for _ in range(4):
        sresctld.slurm.pass_time()
        sresctld.clock.pass_time(1)
        sresctld.cycle()
    assert sresctld.slurm.job(job_id).state == "RUNNING"
    assert sresctld.slurm.now < 1_000_000 + 10
    assert sresctld.journal.pending_requeues() == {}


def test_work_that_came_meanwhile_delays_the_replacement(
    sresctld: Controller, runs: dict[Path, Run]
) -> None:
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    sresctld.cycle()
    busy = msgspec.structs.replace(sresctld.slurm.node("n3"), base="ALLOCATED")
    sresctld.slurm.before["node"] = lambda: sresctld.slurm.put(busy)
    sresctld.cycle()
    assert runs == {}
    assert sresctld.incident.state.waits_for_repair


def test_a_resumed_node_stops_its_replacement(sresctld: Controller, runs: dict[Path, Run]) -> None:
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    sresctld.cycle()
    sresctld.cycle()
    assert len(runs) == 1
    sresctld.slurm.set_node(["n3"], state="resume")
    sresctld.cycle()
    assert runs == {}
    assert sresctld.incident.state is NodeState.HEALTHY


def test_a_quarantined_node_waits_for_a_person(sresctld: Controller, runs: dict[Path, Run]) -> None:
    """It was given up: only a person's answer brings it back into sresctld's hands."""
    sresctld.slurm.set_node(["n3"], state="fail", reason=REPLACE)
    for _ in range(40):
        sresctld.cycle()
        for run in runs:
            runs[run] = Run("ended", 1, "no spare")
        sresctld.clock.pass_time(5)
    assert sresctld.incident.state is NodeState.QUARANTINED
    sresctld.slurm.set_node(["n3"], state="resume")
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.HEALTHY
    assert sresctld.events()[-1] == "released"
    sresctld.is_dead("n3")
    sresctld.cycle()
    assert sresctld.journal.state_of("n3") is NodeState.SET_ASIDE


# -- blind, dry, told, followed -----------------------------------------------------------------


def test_blind_is_still(sresctld: Controller) -> None:
    sresctld.slurm.unreachable = True
    blind = sresctld.observe()
    assert isinstance(blind, Blind) and "Unable to contact" in blind.reason
    empty = Controller(sresctld.state_dir / "other", nodes=0)
    assert isinstance(empty.observe(), Blind)


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    sresctld = Controller(tmp_path, dry_run=True)
    sresctld.is_dead("n3")
    assert "mark n3 down Action:Replace" in sresctld.cycle()
    assert sresctld.slurm.calls == []
    assert sresctld.journal.incidents() == [] and sresctld.journal.events() == []


def test_one_action_that_fails_does_not_stop_the_others(sresctld: Controller) -> None:
    world = sresctld.observe()
    assert isinstance(world, ClusterSnapshot)
    sresctld.actor.act(
        world, (actions.RequeueJob(999, "gone"), actions.RaiseAlarm("k", "look here"))
    )
    assert sresctld.events() == ["failed", "alarm"]


def test_a_supervisor_is_told_once_and_a_new_one_again(sresctld: Controller) -> None:
    job_id = sresctld.slurm.submit(3)
    peer = sresctld.supervise(job_id)
    sresctld.registry.views["n3"] = agent("n3", findings=(finding(),))
    for _ in range(3):
        sresctld.cycle()
    assert peer.told == [("n3", "sick")]
    for _ in range(5):
        # A connection that is gone leaves its id() to the next one.
        sresctld.registry.peers.clear()
        del peer
        gc.collect()
        peer = sresctld.supervise(job_id)
        sresctld.cycle()
        assert peer.told == [("n3", "sick")]


def test_an_alarm_is_said_once(sresctld: Controller) -> None:
    sresctld.slurm.set_node(["n3"], state="fail", reason="action:replace")
    for _ in range(3):
        sresctld.cycle()
    assert sresctld.events("alarm") == ["alarm"]


def test_an_alarm_is_not_said_again_by_each_restart(sresctld: Controller) -> None:
    """systemd starts it again after some seconds, whatever ends it, as often as that happens."""
    sresctld.slurm.set_node(["n3"], state="fail", reason="action:replace")
    for _ in range(4):
        sresctld.cycle()
        sresctld.restart()
        sresctld.clock.pass_time(30)
        sresctld.everybody_beats()
    assert sresctld.events("alarm") == ["alarm"]
    # Long after, a restart tells of what lasts.
    sresctld.clock.pass_time(600)
    sresctld.restart()
    sresctld.everybody_beats()
    sresctld.cycle()
    assert sresctld.events("alarm") == ["alarm", "alarm"]


def test_a_resume_in_a_pause_answers_what_was_found_before_it(sresctld: Controller) -> None:
    sresctld.registry.views["n3"] = agent("n3", findings=(finding(),))
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.SET_ASIDE
    sresctld.journal.pause("a switch is exchanged")
    sresctld.cycle()
    sresctld.slurm.set_node(["n3"], state="resume")
    sresctld.cycle()
    later = finding(subject="GPU 3", at=sresctld.clock.now() + 5)
    sresctld.registry.views["n3"] = agent("n3", findings=(finding(), later))
    for _ in range(3):
        sresctld.cycle()
    assert not sresctld.slurm.node("n3").is_fail
    sresctld.journal.pause("")
    sresctld.cycle()
    assert sresctld.incident.state is NodeState.HEALTHY
    assert set(sresctld.journal.acknowledged()["n3"]) == {("boot-1", *finding().key)}
    sresctld.cycle()
    assert sresctld.slurm.node("n3").is_fail


def test_a_second_resume_in_a_pause_answers_as_well(sresctld: Controller) -> None:
    sresctld.registry.views["n3"] = agent("n3", findings=(finding(),))
    sresctld.cycle()
    sresctld.journal.pause("a switch is exchanged")
    sresctld.slurm.set_node(["n3"], state="resume")
    sresctld.cycle()
    later = finding(subject="GPU 3", at=sresctld.clock.now() + 5)
    sresctld.registry.views["n3"] = agent("n3", findings=(finding(), later))
    sresctld.slurm.set_node(["n3"], state="fail", reason=sresctld.incident.action)
    sresctld.cycle()
    sresctld.slurm.set_node(["n3"], state="resume")
    sresctld.cycle()
    sresctld.journal.pause("")
    for _ in range(3):
        sresctld.cycle()
    assert sresctld.incident.state is NodeState.HEALTHY
    assert not sresctld.slurm.node("n3").is_fail


def test_a_zombie_runs_again_at_once(sresctld: Controller) -> None:
    job_id = sresctld.slurm.submit(3, no_kill=True)
    sresctld.slurm.power_off("n1")
    sresctld.slurm.set_node(["n1"], state="down", reason="person's word")
    assert sresctld.slurm.job(job_id).is_zombie
    for _ in range(6):
        sresctld.cycle()
        sresctld.slurm.pass_time()
        sresctld.clock.pass_time(1)
    after = sresctld.slurm.job(job_id)
    assert (after.state, after.restarts) == ("RUNNING", 1)
    assert [call[0] for call in sresctld.slurm.calls].count("requeue") == 1
    assert sresctld.journal.pending_requeues() == {}


def test_a_stranded_job_is_ended_when_nothing_of_it_runs(sresctld: Controller) -> None:
    job_id = sresctld.slurm.submit(3, no_kill=True, requeue=False)
    peer = sresctld.supervise(job_id)
    sresctld.is_dead("n1")

    def passes(seconds: float) -> list[str]:
        for _ in range(round(seconds)):
            sresctld.cycle()
            sresctld.slurm.pass_time()
            sresctld.clock.pass_time(1)
        return sresctld.events("job-ended")

    assert passes(60) == []
    assert sresctld.slurm.job(job_id).is_stranded
    # It may live on another host than the script.
    sresctld.registry.peers[job_id].remove(peer)
    sresctld.slurm.start_step(job_id)
    assert passes(60) == []
    sresctld.slurm.cancel_step(job_id, "0")
    assert passes(10) == ["job-ended"]
    assert job_id not in {job.id for job in sresctld.slurm.jobs()}


def test_a_job_that_waits_for_nodes_is_not_pushed_all_the_time(sresctld: Controller) -> None:
    job_id = sresctld.slurm.submit(8)
    sresctld.slurm.requeue(job_id)
    sresctld.slurm.pass_time()
    sresctld.slurm.set_node(["n8"], state="drain", reason="one too few")
    sresctld.journal.put_pending_requeue(
        PendingRequeue(job_id, "why", True, 0, sresctld.clock.now())
    )
    sresctld.slurm.calls.clear()
    for _ in range(100):
        sresctld.cycle()
        sresctld.clock.pass_time(0.25)
    given = [call[0] for call in sresctld.slurm.calls].count("start_now")
    assert 3 <= given <= 3 + 25 / jobs.START_AGAIN_SECONDS + 1


def test_every_kind_of_action_has_its_handler(sresctld: Controller) -> None:
    assert set(sresctld.actor._handlers) == set(actions.Action.__args__)


def test_the_defaults_leave_marked_nodes_to_a_person() -> None:
    assert CONFIG.replace.program == ()


def test_a_requeue_is_journaled_with_the_fault_behind_it(sresctld: Controller) -> None:
    """The job's log may be empty when it runs again: the journal is what still knows."""
    job_id = sresctld.slurm.submit(3)
    sresctld.supervise(job_id)
    sresctld.is_dead("n1")  # the batch host
    sresctld.cycle()
    events = [e for e in sresctld.journal.events() if e["job"] == job_id]
    assert [(e["kind"], e["text"].partition(":")[0]) for e in events] == [("requeue", "n1")]
    assert "no beat" in events[0]["text"]


def test_a_job_that_comes_to_a_dead_node_in_the_last_moment_is_left_to_slurm(
    sresctld: Controller, runs: dict[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts it between the look at the idle node and the mark; DOWN would end it."""
    sresctld.is_dead("n3")
    set_node, came = sresctld.slurm.set_node, list[int]()

    def set_late(names: Any, *, state: str = "", reason: str = "") -> None:
        if not came:
            came.append(sresctld.slurm.submit(3))
        set_node(names, state=state, reason=reason)

    monkeypatch.setattr(sresctld.slurm, "set_node", set_late)
    for _ in range(5):
        sresctld.cycle()
    job, node = sresctld.slurm.job(came[0]), sresctld.slurm.node("n3")
    assert job.state == "RUNNING" and "n3" in job.nodes
    assert node.is_fail and not node.is_down and node.requested_action == REPLACE
    assert sresctld.incident.state is NodeState.SET_ASIDE
    assert not runs


@pytest.mark.parametrize("base", ["MIXED", "ALLOCATED"])
@pytest.mark.parametrize(("is_supervised", "is_down"), [(False, False), (True, True)])
def test_a_job_that_comes_to_a_busy_node_in_the_last_moment_is_left_to_slurm(
    sresctld: Controller,
    monkeypatch: pytest.MonkeyPatch,
    is_supervised: bool,
    is_down: bool,
    base: str,
) -> None:
    """It waited in the queue when the node was seen, beside a supervised job with room for it, or
    behind one that ended in that moment."""
    slurm = sresctld.slurm
    watched, waiting = slurm.submit(1), slurm.submit(9)
    sresctld.supervise(watched)
    if is_supervised:
        sresctld.supervise(waiting)
    slurm.put(msgspec.structs.replace(slurm.node("n1"), base=base))
    sresctld.is_dead("n1")
    jobs_of_slurm, set_node = slurm.jobs, slurm.set_node
    has_come = False

    def set_late(names: Any, *, state: str = "", reason: str = "") -> None:
        nonlocal has_come
        has_come = True
        set_node(names, state=state, reason=reason)

    def jobs_now() -> Any:
        runs = {"state": "RUNNING", "nodes": ("n1",)} if has_come else {}
        return tuple(
            msgspec.structs.replace(job, **runs) if job.id == waiting else job
            for job in jobs_of_slurm()
        )

    monkeypatch.setattr(slurm, "set_node", set_late)
    monkeypatch.setattr(slurm, "jobs", jobs_now)
    sresctld.cycle()
    assert (slurm.node("n1").is_fail, slurm.node("n1").is_down) == (True, is_down)


def test_labels_stand_beside_a_persons_comment(sresctld: Controller, runs: dict[Path, Run]) -> None:
    """Over a restart, a text that the person adds meanwhile, and until the node is well."""
    sresctld.slurm.set_comment(["n3"], "rack 7")
    sresctld.is_dead("n3")
    sresctld.cycle()
    sresctld.cycle()
    labelled = sresctld.slurm.node("n3").comment
    assert labelled.startswith("rack 7 [sres health-status=pending-replacement fault-type=dead")
    sresctld.restart()
    sresctld.cycle()
    assert sresctld.slurm.node("n3").comment == labelled
    sresctld.slurm.set_comment(["n3"], f"{labelled} cable?")
    (run,) = runs
    runs[run] = Run("ended", 0, "", sresctld.clock.now())
    sresctld.cycle()
    sresctld.clock.pass_time(1)
    sresctld.cycle()
    sresctld.comes_back("n3")
    for _ in range(3):
        sresctld.cycle()
    assert sresctld.incident.state is NodeState.HEALTHY
    assert sresctld.slurm.node("n3").comment == "rack 7 cable?"


def test_labels_that_slurm_kept_are_taken_off_later(
    sresctld: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise SlurmError("slurmctld is busy")

    sresctld.slurm.set_comment(["n3"], "rack 7 [sres health-status=validating fault-type=dead]")
    with monkeypatch.context() as patch:
        patch.setattr(sresctld.slurm, "set_comment", refuse)
        for _ in range(5):
            sresctld.cycle()
    assert sresctld.labels() == ["its labels are taken off"]
    sresctld.clock.pass_time(60)
    sresctld.cycle()
    assert sresctld.slurm.node("n3").comment == "rack 7"


def test_a_dead_node_that_beats_again_while_it_is_closed_is_not_set_down(
    sresctld: Controller, runs: dict[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow Slurm takes seconds for each call."""
    sresctld.is_dead("n3")
    set_node = sresctld.slurm.set_node

    def set_late(names: Any, *, state: str = "", reason: str = "") -> None:
        set_node(names, state=state, reason=reason)
        sresctld.registry.views["n3"] = agent("n3")

    monkeypatch.setattr(sresctld.slurm, "set_node", set_late)
    sresctld.cycle()
    node = sresctld.slurm.node("n3")
    assert node.is_fail and not node.is_down and node.requested_action == REPLACE
    assert sresctld.incident.state is NodeState.SET_ASIDE


@pytest.mark.parametrize(
    ("reason", "is_asked"),
    [
        (RESET, True),
        (f"{RESET} : reboot issued : reboot complete", True),
        (f"{RESET} : vendor on site", False),
        (REPLACE, False),
    ],
)
def test_the_next_repair_is_asked_for_behind_what_slurm_has_added(
    sresctld: Controller, reason: str, is_asked: bool
) -> None:
    """Slurm adds to our Reason where a person has it reboot the node; a person's word stands."""
    journal, name = sresctld.journal, "n1"
    known = journal.open_incident(name, NodeEvent.DETECTED, "sick", RESET, "xid", 1.0)
    for event in (NodeEvent.MARKED, NodeEvent.EMPTIED, NodeEvent.REPLACING):
        journal.apply(known.id, event, "", 1.0)
    sresctld.slurm.set_node([name], state="fail", reason=reason)
    seen = sresctld.observe()
    assert isinstance(seen, ClusterSnapshot)
    failed = NodeEvent.REPLACEMENT_FAILED
    sresctld.actor.act(seen, [actions.Transition(name, known.id, failed, "", 1.0, REBOOT)], ())
    asked = REBOOT if is_asked else reason
    assert sresctld.slurm.node(name).reason == asked
    assert sresctld.incident.action == (REBOOT if is_asked else RESET)
