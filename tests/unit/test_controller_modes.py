"""`recovery.mode` by cluster, partition and node: what is done, and what is only written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm
from worlds import (
    NOW,
    FakeClock,
    agent,
    config,
    dead,
    decision,
    finding,
    incident,
    job,
    node,
    probes,
    supervised,
    world,
)

from slurm_resilience.config import Config
from slurm_resilience.controller import actions as act
from slurm_resilience.controller import cycle
from slurm_resilience.controller.decide.decision import decide
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import ObservedFault
from slurm_resilience.controller.main import Controller
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.query.history_reader import HistoryReader
from slurm_resilience.controller.query.observed_outcome import review_view
from slurm_resilience.errors import UsageError
from slurm_resilience.model import REPLACE
from slurm_resilience.simulate.cluster.cluster_simulation import simulate_cluster
from slurm_resilience.simulate.cluster.fault_plan import KINDS_WITHOUT_SPARES, plan
from slurm_resilience.simulate.cluster.rules import cluster_rules
from slurm_resilience.simulate.cluster.sim_slurm import SRESCTLD
from slurm_resilience.wire.messages import StatusRequest

OBSERVE = config(recovery={"mode": "observe"})
HARMLESS = (act.RaiseAlarm, act.ProbeNode)


def news(seen: ClusterSnapshot, settings: Config = OBSERVE) -> list[act.NoteObserved]:
    """Return what `observe` writes down, and make sure that it does nothing else."""
    said = decision(seen, settings)
    assert [action for action in said.actions if not isinstance(action, HARMLESS)] == []
    return [note for note in said.notes if isinstance(note, act.NoteObserved)]


def would(note: act.NoteObserved) -> list[str]:
    return [remark.kind for remark in note.fault.would]


def seen_as(note: act.NoteObserved) -> list[str]:
    return [remark.kind for remark in note.fault.then]


def after(note: act.NoteObserved, *nodes: Any, **more: Any) -> ClusterSnapshot:
    """Return a world some time after what was written down."""
    fault = msgspec.structs.replace(note.fault, id=1)
    return world(*nodes, observed={fault.node: fault}, now=NOW + 60, **more)


def test_a_dead_node_is_written_down_and_left_alone() -> None:
    watched = {"jobs": (job(),), "watched": (supervised(),)}
    seen = world(node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), **dead("n2"), **watched)
    (note,) = news(seen)
    assert (note.fault.node, note.fault.kind, note.fault.action) == ("n2", "dead", REPLACE)
    assert "would set down, Action:Replace: no beat for 6.0 s" in note.fault.would[0].text
    assert note.fault.would[0].text.endswith("; job 7 without it")
    # Everything stands in the journal by then: the next cycle has no news.
    assert news(after(note, node("n2", "ALLOCATED"), **dead("n2"))) == []


def test_its_replacement_is_written_down_when_it_would_begin() -> None:
    (note,) = news(world(node("n1"), **dead()))
    silent = dead(silence=400.0, probes={"n1": probes("silent", "silent", "silent")})
    (later,) = news(after(note, node("n1", "DOWN", "Not responding"), **silent))
    assert would(later) == ["would-mark", "would-replace"]
    assert "would start the replacement program: replace n1" in later.news[0].text
    assert news(after(later, node("n1", "DOWN", "Not responding"), **silent)) == []


def test_a_node_that_lives_again_would_be_given_back() -> None:
    (note,) = news(world(node("n1"), **dead()))
    (later,) = news(after(note, node("n1"), agents=(agent(),)))
    assert would(later) == ["would-mark", "would-return"]
    assert seen_as(later) == ["seen-well"] and later.fault.ended == NOW + 60
    view = review_view(later.fault)
    assert (view["outcome"], view["agrees"]) == ("well again by itself", True)


def test_what_people_did_is_written_down() -> None:
    (note,) = news(world(node("n1"), agents=(agent(findings=(finding(),)),)))
    assert would(note) == ["would-mark"]
    drained = node("n1", "IDLE+DRAIN", "bad GPU", reason_by="alice")
    (later,) = news(after(note, drained, agents=(agent(findings=(finding(),)),)))
    assert seen_as(later) == ["seen-set-aside"]
    assert later.news[-1].text == "alice set IDLE+DRAIN: bad GPU"
    # A person has it now: nothing more would be done.
    assert news(after(later, drained, agents=(agent(findings=(finding(),)),))) == []
    newcomer = agent(boot_id="boot-2", instance="another")
    (last,) = news(after(later, node("n1"), agents=(newcomer,)))
    assert seen_as(last)[1:] == ["seen-machine", "seen-in-service", "seen-well"]
    view = review_view(last.fault)
    assert (view["outcome"], view["agrees"]) == ("replaced", False)


def test_a_request_is_written_down_and_not_carried_out() -> None:
    asked = node("n1", "IDLE+FAIL", REPLACE)
    (note,) = news(world(asked, agents=(agent(),)))
    assert note.fault.kind == "requested" and would(note) == ["would-mark"]
    (later,) = news(after(note, asked, agents=(agent(),)))
    assert would(later) == ["would-mark", "would-replace"]


def test_ceilings_hold_for_what_would_be_done() -> None:
    asked = [node(f"n{i}", "IDLE+FAIL", REPLACE) for i in range(1, 12)]
    limit = config(recovery={"mode": "observe"}, replace={"max_running": 2})
    speaking = tuple(agent(known.name) for known in asked)
    notes = news(world(*asked, agents=speaking), limit)
    known = {note.fault.node: msgspec.structs.replace(note.fault, id=9) for note in notes}
    later = news(world(*asked, agents=speaking, observed=known), limit)
    assert sum("would-replace" in would(note) for note in later) == 2


def test_after_a_restart_a_fault_is_not_over_before_the_node_has_spoken() -> None:
    (note,) = news(world(node("n1"), agents=(agent(findings=(finding(),)),)))
    assert news(after(note, node("n1"), agents=(agent(reported=False),))) == []


def test_partitions_and_nodes_have_modes_of_their_own() -> None:
    modes = {"partitions": {"canary": "automatic"}, "nodes": {"n3": "none"}}
    limits = {"nodes_at_once": 9, "partition_at_once": 9}
    mixed = config(recovery={"mode": "observe"} | modes, breaker=limits)
    names = ("n1", "n2", "n3")
    partitions = dict(zip(names, (("main",), ("main", "canary"), ("canary",)), strict=True))
    seen = world(
        *[node(name, partitions=partitions[name]) for name in names],
        agents=tuple(agent(name, silence=6.0) for name in names),
        probes={name: probes("silent", "silent") for name in names},
    )
    said = decision(seen, mixed)
    assert [a.node for a in said.actions if isinstance(a, act.MarkNode)] == ["n2"]
    assert [n.fault.node for n in said.notes if isinstance(n, act.NoteObserved)] == ["n1"]
    alarms = {a.node: a.text for a in said.actions if isinstance(a, act.RaiseAlarm) and a.node}
    assert alarms["n3"].endswith("recovery.mode is none")
    assert "recovery.mode is observe" in alarms["n1"]


def test_a_dead_node_that_is_only_observed_stays_in_its_job() -> None:
    """Its job is changed for the sake of the other node alone."""
    mixed = config(recovery={"nodes": {"n3": "observe"}})
    names = ("n1", "n2", "n3", "n4")
    seen = world(
        *[node(name, "ALLOCATED") for name in names],
        jobs=(job(nodes=names),),
        watched=(supervised(nodes=names),),
        agents=(agent("n1"), agent("n2", silence=6.0), agent("n3", silence=6.0), agent("n4")),
        probes={name: probes("silent", "silent") for name in ("n2", "n3")},
    )
    (mark,) = [a for a in decision(seen, mixed).actions if isinstance(a, act.MarkNode)]
    assert mark.node == "n2" and mark.shrink[0].keep == ("n1", "n3", "n4")


@pytest.mark.parametrize("mode", ["none", "observe"])
@pytest.mark.parametrize("state", [s for s in NodeState if s.is_under_way])
def test_an_open_incident_stops_where_it_is(mode: str, state: NodeState) -> None:
    """It was opened before the node got this mode."""
    known = incident(state=state, run_ended=NOW - 60, resumed=NOW - 60)
    seen = world(node("n1", "IDLE+FAIL", REPLACE), agents=(agent(),), incidents=(known,))
    said = decision(seen, config(recovery={"mode": mode})).actions
    assert {type(action) for action in said} <= {
        act.RaiseAlarm,
        act.ProbeNode,
        act.NotifySupervisor,
    }
    assert any(isinstance(a, act.RaiseAlarm) and f"stays {state}" in a.text for a in said)


def test_a_persons_answer_counts_in_every_mode() -> None:
    resumed = world(node("n1"), agents=(agent(),), incidents=(incident(),))
    said = decision(resumed, OBSERVE).actions
    assert [a.event for a in said if isinstance(a, act.Transition)] == [NodeEvent.RELEASED]


# -- the journal, and its reader --------------------------------------------------------------


def test_the_reader_answers_in_pages(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    (note,) = news(world(node("n1"), **dead()))
    for number in range(5):
        fault = msgspec.structs.replace(note.fault, node=f"n{number}")
        journal.put_observed(fault, note.news)
    assert [event["kind"] for event in journal.events("n0")] == ["would-mark", "observed"]
    assert sorted(journal.memory(NOW, 1.0).observed) == [f"n{number}" for number in range(5)]
    reader = HistoryReader(tmp_path / "journal.db")
    data, after_it = reader.read(StatusRequest("review", limit=3))
    assert [fault["node"] for fault in data["faults"]] == ["n4", "n3", "n2"]
    data, after_it = reader.read(StatusRequest("review", limit=3, after=after_it))
    assert [fault["node"] for fault in data["faults"]] == ["n1", "n0"] and not after_it
    with pytest.raises(UsageError, match="is not what the page before ended with"):
        reader.read(StatusRequest("review", after="1; DROP TABLE observed"))


def test_what_is_over_is_kept_for_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    (note,) = news(world(node("n1"), **dead()))
    journal.put_observed(note.fault)
    (known,) = journal.observed(open_only=True)
    journal.put_observed(msgspec.structs.replace(known, ended=NOW))
    assert journal.observed(open_only=True) == [] and len(journal.observed()) == 1
    journal.prune(NOW)
    assert len(journal.observed()) == 1
    journal.prune(NOW + 1)
    assert journal.observed() == []


# -- whole clusters ---------------------------------------------------------------------------


def test_no_simulated_cluster_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of faults strike there, and people ask for replacements."""
    touched: list[str] = []
    observed: list[ObservedFault] = []

    def node_set(self: Any, before: Any, after: Any, author: str) -> None:
        touched.extend([f"{author} {after.name}"] if author == SRESCTLD else [])

    put = Journal.put_observed

    def put_observed(self: Journal, fault: ObservedFault, *news: Any) -> None:
        observed.append(fault)
        put(self, fault, *news)

    monkeypatch.setattr(cycle, "decide", lambda seen, found, _: decide(seen, found, OBSERVE))
    monkeypatch.setattr(cluster_rules.ClusterRules, "node_set", node_set)
    monkeypatch.setattr(
        cluster_rules.ClusterRules, "run_started", lambda _, run: touched.append(run.intent)
    )
    monkeypatch.setattr(Journal, "put_observed", put_observed)
    for seed in range(40):
        faults = plan(seed, 0.1, 20.0, KINDS_WITHOUT_SPARES)
        simulate_cluster(seed, None, hours=0.1, faults=faults)
    assert touched == []
    assert {fault.kind for fault in observed} == {"dead", "sick", "requested"}
    assert any(fault.ended for fault in observed)


def test_faults_of_nodes_that_are_left_alone_do_not_trip_the_breaker() -> None:
    """A rack with the mode none is switched off; a node elsewhere dies and is marked."""
    rack = [node(f"o{i}", partitions=("desks",)) for i in range(5)]
    silent = [agent(known.name, silence=6.0) for known in (*rack, node("n1"))]
    tried = {view.node: probes("silent", "silent") for view in silent}
    seen = world(node("n1"), *rack, agents=tuple(silent), probes=tried)
    left = decision(seen, config(recovery={"partitions": {"desks": "none"}}))
    marked = [action.node for action in left.actions if isinstance(action, act.MarkNode)]
    assert marked == ["n1"]
    assert not left.snapshot.memory.breaker.is_tripped
    assert decision(seen, config()).snapshot.memory.breaker.is_tripped


def test_nodes_keep_the_mode_of_a_partition_that_is_renamed_meanwhile(tmp_path: Path) -> None:
    """`scontrol reconfigure` while sresctld runs: their protection must not end by that."""
    protected = [node(name, partitions=("prod",)) for name in ("n1", "n2")]
    slurm = FakeSlurm([*protected, node("n3", partitions=("main",))])
    settings = config(
        controller={"state_dir": str(tmp_path)}, recovery={"partitions": {"prod": "none"}}
    )
    daemon = Controller(settings, slurm, slurm.info(), FakeClock())  # type: ignore[arg-type]
    daemon.cycle()
    for known in protected:
        slurm.put(msgspec.structs.replace(known, partitions=("production",)))
    slurm.set_node(["n1", "n3"], state="fail", reason=REPLACE)
    for _ in range(2):
        daemon.cycle()
    assert [known.node for known in daemon.journal.incidents()] == ["n3"]
    daemon.close()
