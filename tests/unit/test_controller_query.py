"""The reading side: the queue of what comes next, and the past by what is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from worlds import (
    CONFIG,
    NOW,
    agent,
    config,
    dead,
    decision,
    finding,
    incident,
    node,
    probes,
    world,
)

from slurm_resilience.cli.past import event_commands, incident_commands
from slurm_resilience.cli.tables import next_in_words
from slurm_resilience.cli.view import queue
from slurm_resilience.config import Config
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import BreakerState, EventFilter
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.query.history_reader import HistoryReader
from slurm_resilience.controller.query.upcoming import next_acts
from slurm_resilience.errors import NotFound, SresError, UsageError
from slurm_resilience.model import REBOOT, REPLACE
from slurm_resilience.wire.messages import StatusRequest

MARKED = node("n1", "DOWN+FAIL", REPLACE)
SICK = {"agents": (agent(findings=(finding(),)),)}
EMPTY = incident(state=NodeState.EMPTY)
ASKED = incident(state=NodeState.EMPTY, kind="requested")


def next_of(seen: ClusterSnapshot, settings: Config = CONFIG) -> str:
    """Return the line of n1, or nothing."""
    diagnoses = diagnose(seen, settings)
    left = decision(seen, settings).left
    acts = next_acts(seen, diagnoses, settings, seen.incidents, left)
    return next_in_words({"node": "n1"} | acts["n1"], NOW) if "n1" in acts else ""


def test_a_dead_node_is_replaced_when_it_was_silent_for_long_enough() -> None:
    silent = dead(silence=260.0, probes={"n1": probes("silent", "silent")})
    said = next_of(world(MARKED, incidents=(EMPTY,), **silent))
    assert said == ("n1: replaced in 40s, because no beat for 5.0 s, unless it answers before")


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (world(node("n1"), agents=(agent(silence=2.0),)), "found dead in 2s, because no beat"),
        (
            world(node("n1"), agents=(agent(silence=90.0),)),
            "found dead after probes that could be answered, because no beat for 90.0 s",
        ),
        (
            world(
                node("n1"),
                agents=(agent(silence=12.0),),
                probes={"n1": probes(*["refused"] * 10)},
            ),
            "found dead in 50s, because no beat for 12.0 s; the machine answers",
        ),
        (world(node("n1"), agents=(agent(),)), ""),
        (
            world(node("n1", "ALLOCATED+FAIL", REPLACE), incidents=(incident(),), **SICK),
            "replaced after the end of its jobs",
        ),
        (
            world(MARKED, incidents=(EMPTY,), can_replace=False, **SICK),
            "replaced after a person: no replacement program is configured",
        ),
        (
            world(MARKED, incidents=(EMPTY,), no_room="8 KiB are free", **SICK),
            "replaced after room on sresctld's disk: 8 KiB are free",
        ),
        (
            world(node("n1", "DOWN+FAIL+MAINTENANCE", REPLACE), incidents=(EMPTY,), **SICK),
            "replaced after a wait (it is in a maintenance reservation), because",
        ),
        (
            world(MARKED, incidents=(ASKED,), stopped=frozenset({"n1"}), agents=(agent(),)),
            "replaced after a wait (an earlier repair of it, which a person stopped, has not",
        ),
        (
            world(MARKED, incidents=(EMPTY,), breaker=BreakerState(NOW - 5, NOW - 5, "x"), **SICK),
            "replaced after the breaker (sres breaker)",
        ),
        (
            world(MARKED, incidents=(incident(state=NodeState.EMPTY, kind="sick"),), **SICK),
            "replaced in 0s, because no beat for 5.0 s, unless a person gives it a Reason",
        ),
        (
            world(
                node("n1", "IDLE+FAIL", REBOOT),
                agents=(agent(),),
                incidents=(
                    incident(
                        state=NodeState.EMPTY, kind="requested", action=REBOOT, next_try=NOW + 30
                    ),
                ),
            ),
            "rebooted in 30s, because no beat for 5.0 s, unless the request is taken back",
        ),
        (
            world(MARKED, incidents=(EMPTY,), agents=(agent(),)),
            "given back after its checks, because its sresd beats, and nothing is found",
        ),
        (
            world(MARKED, incidents=(incident(state=NodeState.REPAIRING, run_started=NOW),)),
            "its program stopped for its time limit in 60m",
        ),
        (
            world(MARKED, incidents=(incident(state=NodeState.VALIDATING, run_ended=NOW - 300),)),
            "tried again in 10m",
        ),
        (
            world(MARKED, incidents=(EMPTY,), paused="maintenance", **SICK),
            "replaced after `sres unpause`",
        ),
    ],
)
def test_what_comes_next(seen: ClusterSnapshot, words: str) -> None:
    said = next_of(seen)
    assert words in said and bool(words) is bool(said)


def test_a_validation_is_waited_for() -> None:
    settings = config(recovery={"validate": ("/bin/x",), "validate_timeout": 300.0})
    known = incident(state=NodeState.VALIDATING, run_ended=NOW - 300)
    runs, lacks = agent(unjudged=("validation",)), agent(judged=("disk",))
    said = next_of(world(MARKED, incidents=(known,), agents=(runs,)), settings)
    assert "tried again in 15m" in said and said.endswith("and its sresd has validated it")
    said = next_of(world(MARKED, incidents=(known,), agents=(lacks,)), settings)
    assert "in service after recovery.validate in sres.toml on the node" in said


def test_the_ceilings_are_waited_for() -> None:
    others = [incident(f"x{i}", NodeState.REPAIRING, id=i + 9) for i in range(1, 3)]
    seen = world(MARKED, incidents=(EMPTY, *others), **SICK)
    few = config(replace={"max_running": 2})
    assert "replaced after the end of one of 2 replacements" in next_of(seen, few)
    nodes = [msgspec.structs.replace(one, partitions=("main",)) for one in (MARKED, node("n2"))]
    seen = world(*nodes, incidents=(EMPTY, incident("n2", NodeState.REPAIRING, id=9)), **SICK)
    few = config(replace={"max_running_partition": 1})
    assert "replaced after the end of the only replacement in partition main" in next_of(seen, few)
    starts = tuple((NOW - 3000 + i, "x1") for i in range(12))
    assert "replaced in 10m" in next_of(world(MARKED, incidents=(EMPTY,), starts=starts, **SICK))


def test_a_node_that_is_left_alone_has_no_next_act() -> None:
    seen = world(MARKED, incidents=(EMPTY,), **SICK)
    for mode in ("none", "observe"):
        assert next_of(seen, config(recovery={"mode": mode})) == ""


def test_the_soonest_is_first_and_what_waits_is_last() -> None:
    views = [
        {"node": "n3", "next": {"at": 0.0}},
        {"node": "n1", "next": {"at": 9.0}},
        {"node": "n4", "next": None},
        {"node": "n2", "next": {"at": 5.0}},
    ]
    assert [act["node"] for act in queue(views)] == ["n2", "n1", "n3"]


# -- the past ---------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal.db")
    for number in range(1, 7):
        name, kind = f"n{number % 3}", ("marked", "alarm")[number % 2]
        journal.event(NOW + number, kind, f"text {number}", node=name, job=number % 2)
    return journal


@pytest.mark.parametrize(
    ("which", "ids"),
    [
        (EventFilter(), [6, 5, 4, 3, 2, 1]),
        (EventFilter(nodes=("n0", "n1")), [6, 4, 3, 1]),
        (EventFilter(kinds=("alarm",)), [5, 3, 1]),
        (EventFilter(job=1, since=NOW + 2), [5, 3]),
        (EventFilter(nodes=("n9",)), []),
        (EventFilter(kinds=("marked' OR 1=1 --",)), []),
    ],
)
def test_events_are_found_by_what_is_looked_for(
    journal: Journal, which: EventFilter, ids: list[int]
) -> None:
    assert [event["id"] for event in journal.find_events(which, 100)] == ids


def pages(reader: HistoryReader, name: str, **asked: Any) -> list[list[int]]:
    found, after = [], ""
    while True:
        data, after = reader.read(StatusRequest(after=after, **asked))
        found.append([entry["id"] for entry in data[name]])
        if not after:
            return found


def test_events_come_in_pages(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = HistoryReader(tmp_path / "journal.db")
    assert pages(reader, "events", what="events", limit=4) == [[6, 5, 4, 3], [2, 1]]
    assert pages(reader, "events", what="events", node="n[0-1]", limit=9) == [[6, 4, 3, 1]]
    module = "slurm_resilience.controller.query.history_reader"
    monkeypatch.setattr(f"{module}.PAGE_BYTES", 1)
    one_by_one = pages(reader, "events", what="events", limit=9)
    assert one_by_one == [[6], [5], [4], [3], [2], [1], []]


def test_incidents_are_found_and_one_is_shown(journal: Journal, tmp_path: Path) -> None:
    for name in ("n1", "n2"):
        journal.open_incident(name, NodeEvent.REQUESTED, "requested", REPLACE, "asked", NOW)
    journal.apply(1, NodeEvent.RELEASED, "taken back", NOW + 1)
    reader = HistoryReader(tmp_path / "journal.db")
    assert pages(reader, "incidents", what="incidents", limit=1) == [[2], [1], []]
    assert pages(reader, "incidents", what="incidents", is_open=True) == [[2]]
    assert pages(reader, "incidents", what="incidents", node="n1") == [[1]]
    data, _ = reader.read(StatusRequest("incidents", incident=1))
    assert data["incidents"][0]["ended_by"] == "released"
    assert len(journal.find_events(EventFilter(incident=1), 10)) == 2
    with pytest.raises(NotFound, match="no incident 77"):
        reader.read(StatusRequest("incidents", incident=77))


def test_a_question_makes_no_journal(journal: Journal, tmp_path: Path) -> None:
    """Any user's question made an empty one in the place of a journal that was moved away."""
    path = tmp_path / "journal.db"
    reader = HistoryReader(path)
    journal.event(NOW, "pause", "now")
    assert reader.read(StatusRequest("history"))[0]["events"]
    path.rename(tmp_path / "moved")
    with pytest.raises(SresError, match="is not there"):
        reader.read(StatusRequest("history"))
    assert not path.exists()
    Journal(path).close()
    assert not reader.read(StatusRequest("history"))[0]["events"]


def test_a_question_that_is_too_long_is_refused(journal: Journal, tmp_path: Path) -> None:
    reader = HistoryReader(tmp_path / "journal.db")
    with pytest.raises(UsageError, match="at most 10000 nodes"):
        reader.read(StatusRequest("events", "n[1-20000]"))
    # Any user asks, and no beat of a node is heard while such a list is read.
    many = ",".join(f"r{i % 97}c{i % 89}n{i % 83}" for i in range(1000))
    with pytest.raises(UsageError, match="characters is too long"):
        reader.read(StatusRequest("events", node=many))
    with pytest.raises(UsageError, match="not a hostlist"):
        reader.read(StatusRequest("events", "n[1-"))


@pytest.mark.parametrize(
    ("text", "at"), [("90s", NOW - 90), ("2h", NOW - 7200), ("3d", NOW - 3 * 86400)]
)
def test_since_is_how_long_ago(text: str, at: float) -> None:
    assert event_commands.moment(text, NOW) == at


def test_since_may_be_a_time_and_nothing_else() -> None:
    assert event_commands.moment("2026-01-31T12:00+00:00", NOW) == 1769860800.0
    for text in ("yesterday", "2x", "", "9999999999d!"):
        with pytest.raises(UsageError, match="write how long ago"):
            event_commands.moment(text, NOW)


def test_a_misspelled_kind_is_no_good_news() -> None:
    said = event_commands.no_event_of(("gave_up",), {"gave-up", "alarm"})
    assert "gave_up" in said and "alarm, gave-up" in said
    assert "newest" not in event_commands.no_event_of(("x", "y"), ())


def test_an_incident_is_shown_with_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {
        "id": 3, "node": "n1", "kind": "dead", "action": REPLACE, "reason": "no beat",
        "state": "healthy", "opened": NOW, "closed": NOW + 90, "ended_by": "closed",
        "attempts": 1, "evidence": "/var/evidence/3: 2 lines",
        "instance_before": "i-1", "boot_id_before": "b-1",
    }  # fmt: skip
    event = {"at": NOW, "kind": "detected", "node": "n1", "text": "dead: no beat"}
    told = {"incidents": [one], "events": [event]}
    monkeypatch.setattr(incident_commands, "newest", lambda _, __, name: told[name])
    shown = CliRunner().invoke(incident_commands.incident, ["show", "3"]).output
    for words in ("incident 3 of n1: healthy", "evidence/3", "i-1, boot b-1", "detected", "90s"):
        assert words in shown
    listed = CliRunner().invoke(incident_commands.incident, ["list"]).output
    assert "no beat" in listed and "healthy" in listed


@pytest.mark.parametrize("field", ["job", "incident"])
def test_a_number_that_the_journal_cannot_hold_is_refused(field: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for number in (2**63, 2**64 - 1):
        request = StatusRequest("events", **{field: number})  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="so large a number"):
            HistoryReader(tmp_path / "journal.db").read(request)
    journal.close()


def test_a_node_whose_repair_left_no_exit_code_is_told_when_it_is_tried_again() -> None:
    known = incident(
        state=NodeState.EMPTY, attempts=1, run_started=NOW - 400.0, run_lost=NOW - 300.0
    )
    for ago in (0.5, 1.5):  # its last probe is fresh, or is to be repeated
        silent = dead(silence=400.0) | {"probes": {"n1": probes("silent", "silent", ago=ago)}}
        said = next_of(world(node(state="DOWN+FAIL", reason=REPLACE), incidents=(known,), **silent))
        assert said.startswith("n1: replaced in 10m,")
