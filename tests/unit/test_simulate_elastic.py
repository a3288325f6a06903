"""Simulated trainings that grow and shrink: no rule is broken, and a broken one is found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from slurm_resilience.cli.simulate import simulate as command
from slurm_resilience.mesh.model import Member, Peer, View
from slurm_resilience.mesh.protocol import world_plan
from slurm_resilience.mesh.protocol.departures import Departures
from slurm_resilience.mesh.protocol.side import Side
from slurm_resilience.mesh.protocol.world_plan import Proposal, WorldRules, last_holders, propose
from slurm_resilience.simulate.invariants import InvariantBroken
from slurm_resilience.simulate.mesh_simulation import elastic_has_speakers, simulate

RUNS = 40


def test_no_rule_is_broken() -> None:
    for seed in range(RUNS):
        simulate(seed, elastic=True, speakers=elastic_has_speakers(seed))


@pytest.mark.parametrize(
    "seed",
    [
        904,  # two that held the same part were asked to leave, and each counted on the other
        1417,  # the same, between two worlds
        41,  # all that held the model stood still together, and a newcomer went on without them
        91000461,  # the same, each a little later than the one before
        91000920,
        218,  # one call held all of them, and a newcomer gave them up for not leaving their block
        127,  # newcomers that never met the lent ranks, which were behind a cut, began anew
        125,  # the same, and the lent ranks only stood still
        3201617,  # one that had been stopped left at once, and had not heard that the core was dead
        771320,  # lent ranks that had to leave counted on one of the core that had fallen silent
        566,  # newcomers that were cut off from lent ranks began anew beside them
        9201015,  # two newcomers each gave up one of the last two holders, for the other's sake
        7502626,  # not one: newcomers behind a cut were all that lived of a world (see the rule)
    ],
)
def test_no_rule_is_broken_again(seed: int) -> None:
    """Each of these runs broke a rule once."""
    simulate(seed, elastic=True)


@pytest.mark.parametrize(
    "seed",
    [
        9910230,  # what a rank said as it left went no further than its own node
        9911253,  # a death was told to other nodes over a connection that was not there yet
        9913730,  # one that was reached another way was taken for one that had been heard
        9911819,  # the speaker did not look at once for a rank that was out of reach
    ],
)
def test_no_rule_is_broken_with_speakers(seed: int) -> None:
    """Each of these runs broke a rule once."""
    simulate(seed, elastic=True, speakers=True)


def test_a_seed_is_replayed_exactly() -> None:
    first: list[str] = []
    second: list[str] = []
    assert simulate(3, first, elastic=True) == simulate(3, second, elastic=True)
    assert first == second and first


def each_for_the_other(
    me: Member, present: Sequence[Member], rules: WorldRules, _: int | None = None
) -> bool:
    return me.peer.id not in last_holders(present, rules.replica_size)


def whoever_is_there(
    present: Sequence[Member], lost: Any, possible: Sequence[View], rules: WorldRules, *_: Any
) -> Proposal:
    return propose(present, lost, possible, rules, 0.0, started=True)


def however_few(
    present: Sequence[Member],
    lost: Any,
    possible: Sequence[View],
    rules: WorldRules,
    waited: float,
    started: bool,
    away: Sequence[Peer],
) -> Proposal:
    few = msgspec.structs.replace(rules, min_world=1)
    return propose(present, lost, possible, few, waited, started, away)


MUTATIONS: dict[str, tuple[str, Any, range, str]] = {
    "two may count on each other": ("may_leave", each_for_the_other, range(904, 905), "its own"),
    "any rank may leave": ("may_leave", lambda *_: True, range(1, 2), "its own"),
    "the last copies are not waited for": (
        "last_holders",
        lambda *_: frozenset[str](),
        range(1362, 1363),
        "no whole state",
    ),
    "newcomers begin by themselves": ("propose", whoever_is_there, range(5), "begins anew"),
    "a size between may step": (
        "world_size",
        lambda seated, rules: len(seated),
        range(20),
        "which is none of",
    ),
    "a world may be too small": ("propose", however_few, range(60, 80), "a world of"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, mutant, seeds, complaint = MUTATIONS[name]
    monkeypatch.setattr(world_plan, attribute, mutant)
    with pytest.raises(InvariantBroken, match=complaint):
        for seed in seeds:
            simulate(seed, elastic=True)


def test_who_gives_up_all_that_one_call_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Side.last_holders
    monkeypatch.setattr(Side, "last_holders", lambda side, now, _=frozenset(): usual(side, now))
    with pytest.raises(InvariantBroken, match="no whole state"):
        simulate(21238, elastic=True)


def test_newcomers_that_neither_ask_nor_look_around_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Departures, "note_listed", lambda *_: None)
    monkeypatch.setattr(world_plan, "SEARCH_SECONDS", 0.0)
    with pytest.raises(InvariantBroken, match=r"step|begins anew"):
        for seed in range(10):
            simulate(seed, elastic=True)


def test_newcomers_that_do_not_ask_the_rendezvous_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Departures, "note_listed", lambda *_: None)
    with pytest.raises(InvariantBroken, match="begins anew"):
        simulate(127, elastic=True)


def test_a_world_that_stands_still_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_resilience.simulate.elastic_rules.STANDSTILL_SECONDS", 0.2)
    with pytest.raises(InvariantBroken, match="only the size has changed"):
        for seed in range(10):
            simulate(seed, elastic=True)


def test_the_command_counts_them() -> None:
    found = CliRunner().invoke(command, ["--only", "elastic", "--runs", "3"])
    assert found.exit_code == 0 and "worlds that stepped" in found.output
    replayed = CliRunner().invoke(command, ["--only", "elastic", "--seed", "1", "--trace"])
    assert "is asked to leave" in replayed.output and "no rule was broken" in replayed.output
