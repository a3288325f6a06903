"""Simulated clusters around the real sresctld: no rule is broken, a broken sresctld is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slurm_resilience.cli.simulate import simulate as command
from slurm_resilience.controller import diagnose
from slurm_resilience.controller.act.actor import Actor
from slurm_resilience.controller.act.repair import RepairActs
from slurm_resilience.controller.decide import breaker, decision, node_events
from slurm_resilience.controller.journal import Journal
from slurm_resilience.errors import UsageError
from slurm_resilience.simulate.cluster.cluster_campaign import CONTROLLER_CAMPAIGN
from slurm_resilience.simulate.cluster.cluster_faults import FaultKind, plan
from slurm_resilience.simulate.cluster.cluster_rules import ClusterRule
from slurm_resilience.simulate.cluster.cluster_simulation import simulate_cluster
from slurm_resilience.simulate.cluster.sim_host import SimHost

RUNS = 200
HOURS, FAULTS_AN_HOUR = 0.1, 20.0
"""Short runs, with two faults each: the campaign of `scripts/bench simulate` has the long ones."""
MOST_RUNS = 60
"""In which a broken rule must be found."""
Kind = FaultKind


def broken(
    seed: int, kinds: tuple[FaultKind, ...] = tuple(FaultKind), trace: list[str] | None = None
) -> str:
    """Return the first broken rule of a run, and its text; empty: none."""
    faults = plan(seed, HOURS, FAULTS_AN_HOUR, kinds)
    run = simulate_cluster(seed, trace, hours=HOURS, faults=faults)
    return "".join(f"{one.rule}: {one.text}" for one in run.broken)


def test_no_rule_is_broken() -> None:
    for seed in range(RUNS):
        assert (seed, broken(seed)) == (seed, "")


def test_a_seed_is_replayed_exactly() -> None:
    for seed in range(5):
        first: list[str] = []
        second: list[str] = []
        assert broken(seed, tuple(Kind), first) == broken(seed, tuple(Kind), second)
        assert first == second and first


def no_op(*_: Any, **__: Any) -> None:
    return None


def fail(*_: Any) -> None:
    raise RuntimeError("the failure cannot be noted")


def without_turns(*arguments: Any, **_: Any) -> Any:
    """Find the progress of all, and count no program that this cycle starts."""
    snapshot, config, diagnoses, moved = arguments
    for incident in snapshot.incidents.values():
        if incident.node not in moved:
            yield from node_events.progress(
                snapshot, config, incident, diagnoses.get(incident.node)
            )


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any], tuple[FaultKind, ...], ClusterRule]] = {
    "a failed act ends it": (
        Actor,
        "_note_failure",
        fail,
        (Kind.PERSON_ASKS, Kind.DISK_RUNS, Kind.SLURM_AWAY),
        ClusterRule.DAEMON_LIVES,
    ),
    "programs of this cycle are not counted": (
        decision,
        "progress_of_all",
        without_turns,
        (Kind.PERSON_ASKS,),
        ClusterRule.MOST_PROGRAMS,
    ),
    "a run holds no lock": (
        SimHost,
        "is_held",
        lambda *_: False,
        (Kind.PERSON_ASKS,),
        ClusterRule.ONCE,
    ),
    "a person's reason is taken for Slurm's own": (
        diagnose,
        "is_a_persons",
        lambda *_: False,
        (Kind.PERSON_DRAINS, Kind.SICK_REBOOT),
        ClusterRule.PERSONS_NODE,
    ),
    "a pause is not written down": (
        Journal,
        "pause",
        no_op,
        (Kind.PERSON_PAUSES, Kind.PERSON_ASKS),
        ClusterRule.PAUSE,
    ),
    "an alarm is raised in each cycle": (
        Actor,
        "_raise_alarm",
        lambda self, _, action: self._reporter.event("alarm", action.text, node=action.node),
        (Kind.PERSON_DRAINS,),
        ClusterRule.ALARMS,
    ),
    "a person's resume is not remembered": (
        decision,
        "answers_of_keepers",
        lambda *_: iter(()),
        (Kind.PERSON_PUTS_BACK, Kind.STORM_OF_FAULTS),
        ClusterRule.PERSONS_NODE,
    ),
    "the breaker never trips": (
        breaker,
        "_excess",
        lambda *_: "",
        (Kind.STORM_OF_DEATHS, Kind.STORM_OF_BLIPS),
        ClusterRule.MOST_MARKS,
    ),
    "a node that beats again is set DOWN": (
        RepairActs,
        "beats",
        lambda *_: False,
        (Kind.STORM_OF_BLIPS, Kind.SLURM_SLOW),
        ClusterRule.LIVING_DOWN,
    ),
    "no program is ever judged": (
        node_events,
        "_from_repairing",
        lambda *_: iter(()),
        (Kind.PERSON_ASKS,),
        ClusterRule.AS_IT_SHOULD_BE,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_sresctld_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant, kinds, rule = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    found = (broken(seed, kinds) for seed in range(MOST_RUNS))
    assert any(text.startswith(rule) for text in found)


def test_figures_go_on_where_they_stopped(tmp_path: Path) -> None:
    file, ticks = tmp_path / "figures.json", iter(range(100))
    run = CONTROLLER_CAMPAIGN.go_on
    first = run(7, 1, file=file, clock=lambda: next(ticks))
    assert first.controller_runs == 1
    both = run(7, 2, file=file, clock=lambda: next(ticks))
    at_once = run(7, 2, clock=lambda: next(ticks))
    assert (both.controller_runs, both.controller_faults) == (2, 12)
    assert both.controller_kinds == at_once.controller_kinds
    with pytest.raises(UsageError, match="--seed 7"):
        CONTROLLER_CAMPAIGN.load(file, 8)
    file.write_text("{")
    with pytest.raises(UsageError, match="no figures"):
        CONTROLLER_CAMPAIGN.load(file, 7)


def test_a_violation_prints_its_shortest_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimHost, "is_held", lambda *_: False)
    words = ["--only", "controller"]
    found = CliRunner().invoke(command, [*words, "--runs", "20"], standalone_mode=False)
    assert "runs broke a rule" in str(found.exception)
    seed = str(found.exception).split("--seed ")[1].split()[0]
    replayed = CliRunner().invoke(command, [*words, "--seed", seed, "--trace"])
    assert "a rule was broken" in replayed.output
    assert replayed.output.count("FAULT") <= 2
