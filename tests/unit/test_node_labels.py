"""Labels in a node's Comment: a person's own text stays beside them, over every change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import actions, agent, decision, finding, incident, node, world

from slurm_resilience.controller import actions as act
from slurm_resilience.controller.decide.labelling import labels_for
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.model import REBOOT, REPLACE
from slurm_resilience.slurm import parse
from slurm_resilience.slurm.node_labels import MAX_REASON, labels_of, own_text, with_labels

XID = {
    "health-status": "pending-reboot",
    "fault-type": "xid",
    "fault-reason": "Xid 79 on GPU 0000:04:00",
}
BLOCK = "[sres health-status=pending-reboot fault-type=xid fault-reason=Xid 79 on GPU 0000:04:00]"
OWN_TEXTS = st.text(st.characters(codec="ascii", exclude_characters="[]"), max_size=40).map(
    lambda text: " ".join(text.split())
)
VALUES = st.text(max_size=200)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", BLOCK),
        ("RMA 4711", f"RMA 4711 {BLOCK}"),
        ("[sres health-status=validating] behind it", f"behind it {BLOCK}"),
        ("sres: no beat for 5.0 s (incident 3)", BLOCK),
        (
            "[sres deep-check-status=failed fault-type=dead]",
            BLOCK.replace("[sres", "[sres deep-check-status=failed"),
        ),
        ("rack [7]", f"rack [7] {BLOCK}"),
    ],
)
def test_a_persons_text_and_others_labels_stay(before: str, after: str) -> None:
    labelled = with_labels(before, XID)
    own = own_text(before)
    assert sorted(labels_of(labelled).items()) == sorted(labels_of(after).items())
    assert own_text(labelled) == own
    assert with_labels(labelled, XID) == labelled
    foreign = "[sres deep-check-status=failed]" if "deep-check" in before else ""
    assert with_labels(labelled, {}) == " ".join(part for part in (own, foreign) if part)


def test_a_text_that_cannot_be_written_back_is_left_as_it_is() -> None:
    comment = b"Geh\xe4use offen".decode("utf-8", "replace")  # Latin-1, as it is read from Slurm
    assert with_labels(comment, XID) == comment
    assert with_labels(f"{comment} {BLOCK}", {}) == f"{comment} {BLOCK}"


@given(own=OWN_TEXTS.filter(lambda text: not text.startswith("sres: ")), reason=VALUES, kind=VALUES)
def test_any_text_is_kept_and_any_label_is_read_again(own: str, reason: str, kind: str) -> None:
    labels = {"health-status": "validating", "fault-type": kind, "fault-reason": reason}
    comment = with_labels(own, labels)
    assert own_text(comment) == own
    assert with_labels(comment, {}) == own
    found = labels_of(comment)
    assert found["health-status"] == "validating"
    assert len(found.get("fault-reason", "")) <= MAX_REASON
    assert with_labels(comment, found) == comment
    # Slurm prints it behind the Reason, and neither is misread for the other.
    line = f"NodeName=n1 State=DOWN Reason={REPLACE} [root@2026-01-01T00:00:00] Comment={comment} "
    if own.isprintable() and "=" not in own and "(null)" not in own:
        (seen,) = parse.nodes(line.strip())
        assert (seen.reason, seen.reason_unclear) == (REPLACE, False)


@pytest.mark.parametrize(
    ("state", "kind", "reason", "labels"),
    [
        (NodeState.SET_ASIDE, "sick", "xid: Xid 79", ("pending-replacement", "xid", "Xid 79")),
        (
            NodeState.REPAIRING,
            "dead",
            "no beat: 5 s",
            ("pending-replacement", "dead", "no beat: 5 s"),
        ),
        (NodeState.RETURNING, "requested", "by root", ("validating", "requested", "by root")),
        (NodeState.QUARANTINED, "dead", "silent", ("unschedulable", "dead", "silent")),
        (NodeState.HELD, "dead", "silent", ()),
        (NodeState.HEALTHY, "dead", "silent", ()),
        (NodeState.SUSPECT, "dead", "silent", ()),
    ],
)
def test_the_labels_of_an_incident(
    state: NodeState, kind: str, reason: str, labels: tuple[str, ...]
) -> None:
    known = incident(state=state, kind=kind, reason=reason)
    assert tuple(labels_for(known).values()) == labels


def test_a_reboot_is_pending_by_its_own_label() -> None:
    known = incident(state=NodeState.EMPTY, action=REBOOT)
    assert labels_for(known)["health-status"] == "pending-reboot"


@pytest.mark.parametrize(
    ("comment", "last", "is_stale"),
    [
        (f"mine {BLOCK}", None, True),
        ("sres: no beat (incident 3)", None, True),
        ("mine", None, False),
        ("[sres deep-check-status=failed]", None, False),
        (BLOCK, incident(state=NodeState.QUARANTINED, reason_at="2026-01-01T00:00:00"), False),
        (BLOCK, incident(state=NodeState.HELD), True),
    ],
)
def test_labels_that_have_outlived_their_incident_are_taken_off(
    comment: str, last: object, is_stale: bool
) -> None:
    state = "IDLE+FAIL" if last is not None else "IDLE"
    seen = node("n1", state, "RMA 4711" if last is not None else "", comment=comment)
    rest = (last,) if last is not None else ()
    found = decision(world(seen, agents=(agent(),), at_rest=rest)).actions  # type: ignore[arg-type]
    assert [isinstance(one, act.TakeLabelsOff) for one in found].count(True) == is_stale


FAILED = finding(check="lifecycle", subject="50-fit.sh", text="50-fit.sh failed (exit code 1)")


def test_after_a_repair_the_labels_name_what_is_found_now() -> None:
    known = incident(state=NodeState.EMPTY, kind="sick", reason="xid: Xid 79")
    assert labels_for(known, (FAILED,))["fault-type"] == "xid"
    tried = incident(state=NodeState.EMPTY, kind="sick", reason="xid: Xid 79", attempts=1)
    assert labels_for(tried)["fault-type"] == "xid"
    assert labels_for(tried, (FAILED,)) == {
        "health-status": "pending-replacement",
        "fault-type": "lifecycle",
        "fault-reason": "50-fit.sh failed (exit code 1)",
    }


@pytest.mark.parametrize("state", [NodeState.EMPTY, NodeState.QUARANTINED])
def test_labels_that_are_not_the_incidents_are_written_once_more(state: NodeState) -> None:
    known = incident(state=state, attempts=1)
    labels = labels_for(known, (FAILED,))
    for comment, is_outdated in (
        (with_labels("RMA 4711", labels), False),
        ("a person wrote over it", True),
        (with_labels("", labels_for(known)), True),
    ):
        seen = node("n1", "IDLE+FAIL", REPLACE, comment=comment)
        speaks = (agent(findings=(FAILED,), judged=("lifecycle",)),)
        of = {"at_rest" if state.is_at_rest else "incidents": (known,)}
        now = world(seen, agents=speaks, **of)
        found = actions(now, act.RenewLabels)
        assert "RenewLabels" not in decision(now).sentence
        assert found == ([act.RenewLabels("n1", 1)] if is_outdated else [])


def test_a_node_that_a_person_keeps_gets_no_labels_once_more() -> None:
    seen = node("n1", "IDLE+DRAIN", "RMA 4711")
    known = incident(state=NodeState.HELD)
    assert actions(world(seen, agents=(agent(),), at_rest=(known,)), act.RenewLabels) == []
