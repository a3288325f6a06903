"""Calm nodes are passed over: all that is decided is what is decided from every node."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import CONFIG, MOMENT, NOW, agent, config, finding, incident, node, probes, world

from slurm_resilience.config import Config
from slurm_resilience.controller import cycle
from slurm_resilience.controller.calm import calm_nodes
from slurm_resilience.controller.calm.agent_views import AgentFacts, AgentView, AgentViews
from slurm_resilience.controller.calm.calm_nodes import CalmNodes
from slurm_resilience.controller.calm.notable import has_calm, notable
from slurm_resilience.controller.decide.decision import Decision, decide
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.controller.journal.records import Fault, KnownAgent
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Node, Severity
from slurm_resilience.simulate.cluster.cluster_simulation import simulate_cluster
from slurm_resilience.simulate.cluster.fault_plan import FaultKind, plan
from slurm_resilience.slurm.node_labels import HEALTH, with_labels

NAMES = tuple(f"n{number}" for number in range(1, 6))
SEEDS = 12


def with_views(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Return the snapshot with its agents as the registry gives them."""
    facts = {name: facts_of(view) for name, view in snapshot.agents.items()}
    heard_at = {name: view.heard_at for name, view in snapshot.agents.items()}
    views = AgentViews(facts, heard_at, snapshot.moment)
    return msgspec.structs.replace(snapshot, agents=views)


def facts_of(view: AgentView) -> AgentFacts:
    fields = AgentFacts.__struct_fields__
    known = {name: getattr(view, name) for name in fields if name != "steady_since"}
    return AgentFacts(steady_since=MOMENT - view.steady, **known)


def slowly(snapshot: ClusterSnapshot, settings: Config) -> tuple[Any, Decision]:
    """Return what is diagnosed and decided where no node is known to be calm."""
    plain = msgspec.structs.replace(
        snapshot, nodes=dict(snapshot.nodes), agents=dict(snapshot.agents)
    )
    found = diagnose(plain, settings)
    return found, decide(plain, found, settings)


def compare(snapshot: ClusterSnapshot, calm: CalmNodes, settings: Config) -> ClusterSnapshot:
    """Check that nothing else follows from the notable nodes alone; return them set apart."""
    apart = calm.set_apart(snapshot, settings.detect.silent_after)
    all_found, slow = slowly(snapshot, settings)
    found = diagnose(apart, settings)
    assert dict(found) == all_found and list(found) == list(all_found)
    fast = decide(apart, found, settings)
    for part in ("notes", "actions", "sentence", "left"):
        assert getattr(fast, part) == getattr(slow, part)
    assert fast.snapshot == slow.snapshot
    return apart


STATES = ("IDLE", "ALLOCATED", "MIXED", "IDLE+DRAIN", "DOWN", "IDLE+NOT_RESPONDING", "FUTURE")
REASONS = ("", "Action:Replace", "action replace", "Kill task failed", "a bad fan")
COMMENTS = ("", "mine", with_labels("mine", {HEALTH: "pending-reboot"}))


@st.composite
def nodes_of_slurm(draw: st.DrawFn, name: str) -> Node:
    # Mostly in order: else no node would ever be calm.
    if draw(st.booleans()):
        return node(name, draw(st.sampled_from(STATES[:3])))
    return node(
        name,
        draw(st.sampled_from(STATES)),
        draw(st.sampled_from(REASONS)),
        comment=draw(st.sampled_from(COMMENTS)),
        gres_used=draw(st.sampled_from(("", "gpu:h100:0", "gpu:h100:2(IDX:0-1)"))),
        stale_reason=draw(st.sampled_from(("", "", "a bad fan"))),
        reason_unclear=draw(st.booleans()) and draw(st.booleans()),
    )


@st.composite
def agents_of_nodes(draw: st.DrawFn, name: str) -> AgentView | None:
    if draw(st.booleans()):
        return agent(name)
    found = draw(st.sampled_from(((), (), (finding(Severity.MONITOR),), (finding(),))))
    silence = draw(st.sampled_from((0.1, 1.5, 1.6, 6.0)))
    spoke, left = draw(st.booleans()), draw(st.booleans())
    view = agent(name, silence, connected=draw(st.booleans()), spoke=spoke, said_goodbye=left)
    boot = draw(st.sampled_from(("boot-1", "boot-2")))
    view = msgspec.structs.replace(view, findings=found, boot_id=boot)
    return view if draw(st.integers(0, 4)) else None


NODES = {name: nodes_of_slurm(name) for name in NAMES}
AGENTS = {name: agents_of_nodes(name) for name in NAMES}
SUBSETS = st.sets(st.sampled_from(NAMES), max_size=2)


@st.composite
def journals(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what the journal knows of some nodes."""
    states = st.sampled_from(tuple(NodeState))
    under_way = draw(SUBSETS)
    opened = [
        incident(name, draw(states.filter(lambda state: state.is_under_way)), id=number)
        for number, name in enumerate(under_way, start=1)
    ]
    rest = [
        incident(name, draw(st.sampled_from((NodeState.HELD, NodeState.QUARANTINED))), id=number)
        for number, name in enumerate(draw(SUBSETS) - under_way, start=10)
    ]
    faults = {name: Fault(name, "", (), NOW - 9, draw(st.booleans())) for name in draw(SUBSETS)}
    return {
        "incidents": tuple(opened),
        "at_rest": tuple(rest),
        "faults": faults,
        "kept": frozenset(draw(SUBSETS)),
        "missing": dict.fromkeys(draw(SUBSETS), NOW - 30),
        "paused": draw(st.sampled_from(("", "", "a person"))),
    }


@settings(deadline=None)
@given(st.data())
def test_all_that_is_decided_is_decided_from_the_notable_nodes(data: st.DataObject) -> None:
    calm = CalmNodes()
    listed = {name: node(name) for name in NAMES}
    views: dict[str, AgentView | None] = {name: agent(name) for name in NAMES}
    modes = config(recovery={"mode": data.draw(st.sampled_from(("automatic", "observe", "none")))})
    for _ in range(3):
        for name in data.draw(SUBSETS):
            listed[name] = data.draw(NODES[name])
        for name in data.draw(SUBSETS):
            views[name] = data.draw(AGENTS[name])
        gone = data.draw(SUBSETS)
        journal = data.draw(journals())
        of_probes = {name: probes("silent", "silent") for name in data.draw(SUBSETS)}
        snapshot = world(
            *(listed[name] for name in NAMES if name not in gone),
            agents=tuple(view for view in views.values() if view is not None),
            probes=of_probes,
            **journal,
        )
        known = dict(snapshot.heard.known_agents)
        known |= {name: KnownAgent(name, "boot-0", "another") for name in data.draw(SUBSETS)}
        heard = msgspec.structs.replace(snapshot.heard, known_agents=known)
        snapshot = with_views(msgspec.structs.replace(snapshot, heard=heard))
        compare(snapshot, calm, modes)


@pytest.mark.parametrize("state", ["IDLE", "IDLE+NOT_RESPONDING"])
def test_nodes_in_order_are_calm(state: str) -> None:
    """A slurmd that does not answer is Slurm's to judge: the machine lives."""
    snapshot = with_views(world(node("n1", state), agents=(agent("n1"),)))
    apart = compare(snapshot, CalmNodes(), CONFIG)
    assert has_calm(apart.nodes) and not notable(apart.nodes)


@pytest.mark.parametrize(
    "changed",
    [
        {"nodes": (node("n1", "DOWN"),)},
        {"nodes": (node("n1", reason="Action:Replace"),)},
        {"nodes": (node("n1", stale_reason="a bad fan"),)},
        {"nodes": (node("n1", comment=COMMENTS[-1]),)},
        {"nodes": (node("n1", gres_used="gpu:2"),)},
        {"agents": (agent("n1", 1.6),)},
        {"agents": (agent("n1", findings=(finding(Severity.MONITOR),)),)},
        {"agents": (agent("n1", connected=False),)},
        {"agents": ()},
        {"kept": frozenset(("n1",))},
        {"at_rest": (incident("n1", NodeState.HELD),)},
        {"incidents": (incident("n1"),)},
    ],
    ids=str,
)
def test_a_node_that_is_not_in_order_is_notable(changed: dict[str, Any]) -> None:
    calm = CalmNodes()
    before = with_views(world(node("n1"), agents=(agent("n1"),)))
    calm.set_apart(before, CONFIG.detect.silent_after)
    more = {"nodes": (node("n1"),), "agents": (agent("n1"),)} | changed
    snapshot = with_views(world(*more.pop("nodes"), **more))
    assert list(notable(compare(snapshot, calm, CONFIG).nodes)) == ["n1"]


@pytest.mark.parametrize(
    "view", [agent("n1", 1.6), agent("n1", findings=(finding(),))], ids=["silent", "sick"]
)
def test_a_faulty_node_that_is_taken_for_a_calm_one_is_found(
    view: AgentView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calm_nodes, "is_calm", lambda *_: True)
    careless = config(detect={"silent_after": math.inf})
    snapshot = with_views(world(node("n1"), agents=(view,)))
    apart = CalmNodes().set_apart(snapshot, careless.detect.silent_after)
    assert dict(diagnose(apart, CONFIG)) != slowly(snapshot, CONFIG)[0]


def test_the_simulated_sresctld_decides_as_from_every_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed_over: list[int] = []

    def decide_twice(snapshot: ClusterSnapshot, found: Any, settings: Config) -> Decision:
        all_found, slow = slowly(snapshot, settings)
        assert dict(found) == all_found
        fast = decide(snapshot, found, settings)
        for part in ("notes", "actions", "sentence", "left"):
            assert getattr(fast, part) == getattr(slow, part)
        passed_over.append(len(snapshot.nodes) - len(notable(snapshot.nodes)))
        return fast

    monkeypatch.setattr(cycle, "decide", decide_twice)
    for seed in range(SEEDS):
        run = simulate_cluster(seed, hours=0.1, faults=plan(seed, 0.1, 20.0, tuple(FaultKind)))
        assert (seed, run.broken) == (seed, ())
    assert sum(passed_over) > len(passed_over)
