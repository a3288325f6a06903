"""The node's life as a table: what it allows, what it never allows, and its picture in the docs."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.controller.decide.node_lifecycle import (
    TABLE,
    NodeEvent,
    NodeState,
    SideAct,
    step,
)
from slurm_resilience.errors import IllegalTransition

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
EDGE = re.compile(r"(?=(?<![a-z-])([a-z-]+) ──([a-z-]+)──► ([a-z-]+)\b)")


def reached_from(start: NodeState) -> set[NodeState]:
    """Return every state that some events lead to."""
    found, to_visit = {start}, [start]
    while to_visit:
        state = to_visit.pop()
        for (before, _), (after, _) in TABLE.items():
            if before is state and after not in found:
                found.add(after)
                to_visit.append(after)
    return found


def test_every_state_is_reached_and_leads_back_to_service() -> None:
    assert reached_from(NodeState.HEALTHY) == set(NodeState)
    for state in NodeState:
        assert NodeState.HEALTHY in reached_from(state), state
        assert any(before is state for before, _ in TABLE), f"no way out of {state}"


def test_every_event_happens_somewhere() -> None:
    assert {event for _, event in TABLE} == set(NodeEvent)


def test_a_state_is_healthy_or_under_way_or_at_rest() -> None:
    for state in NodeState:
        kinds = [state is NodeState.HEALTHY, state.is_under_way, state.is_at_rest]
        assert kinds.count(True) == 1, state
    for state in NodeState:
        if state.is_marked or state.waits_for_repair or state.is_in_repair:
            assert state.is_under_way


def test_only_a_person_takes_a_node_out_of_rest() -> None:
    out = [event for (before, event) in TABLE if before.is_at_rest]
    assert out and all(event.is_a_persons for event in out)


def test_a_person_alone_holds_a_node_and_sresctld_alone_gives_up() -> None:
    for (_, event), (after, _) in TABLE.items():
        if after is NodeState.HELD:
            assert event.is_a_persons
        assert (after is NodeState.QUARANTINED) is (event is NodeEvent.GAVE_UP)


def test_a_person_can_answer_in_every_state_that_slurm_shows() -> None:
    for state in NodeState:
        if state.is_marked:
            answers = {event for before, event in TABLE if before is state and event.is_a_persons}
            assert NodeEvent.REMOVED in answers and len(answers) >= 2


def test_a_change_of_mind_and_a_persons_answer_are_two_events() -> None:
    assert not NodeEvent.RECOVERED.is_a_persons and NodeEvent.RELEASED.is_a_persons
    assert [before for before, event in TABLE if event is NodeEvent.RECOVERED] == [
        NodeState.SUSPECT
    ]


def test_a_program_is_started_on_empty_nodes_only_and_stopped_while_it_runs_only() -> None:
    starts = [before for before, event in TABLE if event is NodeEvent.REPLACING]
    assert starts == [NodeState.EMPTY]
    for (before, _), (_, acts) in TABLE.items():
        if SideAct.STOP_PROGRAM in acts:
            assert before is NodeState.REPAIRING


@given(events=st.lists(st.sampled_from(list(NodeEvent)), max_size=40))
def test_any_sequence_of_events(events: list[NodeEvent]) -> None:
    """A state follows from the table or stays; a program runs only after the node was empty; a node
    comes out of rest only by a person's event."""
    state, was_emptied = NodeState.HEALTHY, False
    for event in events:
        before = state
        if (state, event) in TABLE:
            state = step(state, event).state
        else:
            with pytest.raises(IllegalTransition, match=f"{before}.*{event}"):
                step(state, event)
            continue
        if state is NodeState.REPAIRING:
            assert before is NodeState.EMPTY and was_emptied
        if before.is_at_rest:
            assert event.is_a_persons
        if not state.is_under_way and before.is_under_way:
            is_settled = event in (
                NodeEvent.CLOSED,
                NodeEvent.RECOVERED,
                NodeEvent.JUDGED_ANEW,
                NodeEvent.GAVE_UP,
            )
            assert is_settled or event.is_a_persons
        # One that came back without an incident was DOWN: Slurm has no job on it.
        was_down = before is NodeState.HEALTHY and event is NodeEvent.CAME_BACK
        if was_down or event in (NodeEvent.EMPTIED, NodeEvent.REPLACEMENT_FAILED):
            was_emptied = True
        elif state is NodeState.SET_ASIDE or not state.is_under_way:
            was_emptied = False


def test_the_docs_draw_the_table() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## The life of a node")[1].split("\n## ")[0]
    drawn = [edge for line in section.splitlines() for edge in EDGE.findall(line)]
    known = [(before.value, event.value, row.state.value) for (before, event), row in TABLE.items()]
    assert len(drawn) == len(set(drawn)), "drawn twice"
    assert sorted(drawn) == sorted(known)


def test_the_docs_explain_every_state() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## The life of a node")[1].split("\n## ")[0]
    rows = defaultdict(str, re.findall(r"^\| `([a-z-]+)` \| (.+?) \|", section, re.MULTILINE))
    assert set(rows) == {state.value for state in NodeState}
