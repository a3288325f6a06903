"""Diagnose: one diagnosis for each node, and none from silence alone."""

from __future__ import annotations

import msgspec
import pytest
from worlds import NOW, agent, config, dead, finding, job, node, probes, verdict, world

from slurm_resilience.controller import diagnose as diagnose_module
from slurm_resilience.controller.diagnose import (
    SLURM_USERS,
    diagnose,
    is_a_persons,
    persons_reason,
)
from slurm_resilience.model import REBOOT, REPLACE, Severity


def test_a_beating_node_is_healthy() -> None:
    assert verdict(world(node(), agents=(agent(),))).kind == "healthy"


def test_a_node_without_sresd_is_unknown_while_slurm_hears_it() -> None:
    assert verdict(world(node())).kind == "unknown"


def test_a_stopped_sresd_is_no_silence() -> None:
    stopped = agent(silence=900, said_goodbye=True)
    seen = verdict(world(node(), agents=(stopped,)))
    assert (seen.kind, seen.probe) == ("unknown", False)


def test_a_node_that_slurmd_left_is_not_dead_while_its_sresd_beats() -> None:
    assert verdict(world(node(state="IDLE+NOT_RESPONDING"), agents=(agent(),))).kind == "unknown"


# -- silence ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silence", "answers", "kind"),
    [
        (1.4, (), "healthy"),
        (1.6, (), "suspect"),
        (3.9, ("silent", "silent"), "suspect"),
        (6.0, (), "suspect"),
        (6.0, ("silent",), "suspect"),
        (6.0, ("silent", "silent"), "dead"),
        (6.0, ("answered",), "unknown"),
        (6.0, ("silent", "answered"), "unknown"),
        (6.0, ("answered", "silent"), "unknown"),
        (6.0, ("answered", "silent", "silent"), "dead"),
        (6.0, ("refused", "refused"), "suspect"),
        (6.0, ("silent", "refused"), "suspect"),
    ],
)
def test_silence_and_probes(silence: float, answers: tuple[str, ...], kind: str) -> None:
    tried = {"n1": probes(*answers, ago=0.3)}  # type: ignore[arg-type]
    seen = verdict(world(node(), agents=(agent(silence=silence),), probes=tried))
    assert seen.kind == kind
    assert seen.action == (REPLACE if kind == "dead" else "")


def test_probes_from_before_the_last_beat_say_nothing() -> None:
    old = {"n1": probes("silent", "silent", "silent", ago=7.0)}
    assert verdict(world(node(), agents=(agent(silence=6.0),), probes=old)).kind == "suspect"


def test_a_refused_port_is_death_only_after_long() -> None:
    settings = config(detect={"refused_after": 60.0})
    for ago, kind in ((50.0, "suspect"), (61.0, "dead")):
        tried = {"n1": (*probes("refused", ago=ago), *probes("refused"))}
        seen = world(node(), agents=(agent(silence=100.0),), probes=tried)
        assert verdict(seen, settings=settings).kind == kind


def test_after_our_start_a_node_has_time_to_speak() -> None:
    silent = agent(silence=8.0, spoke=False)
    tried = {"n1": probes("silent", "silent")}
    assert verdict(world(node(), agents=(silent,), probes=tried, uptime=9.0)).kind == "unknown"
    assert verdict(world(node(), agents=(silent,), probes=tried, uptime=11.0)).kind == "dead"


def test_without_sresd_slurms_own_silence_is_probed() -> None:
    lost = node(state="IDLE+NOT_RESPONDING")
    assert verdict(world(lost)).kind == "suspect"
    assert verdict(world(lost)).probe
    assert verdict(world(lost, probes={"n1": probes("silent", "silent")})).kind == "dead"
    assert verdict(world(lost, probes={"n1": probes("silent", "answered")})).kind == "unknown"


def test_slurms_own_down_does_not_hide_death() -> None:
    lost = node(state="DOWN+NOT_RESPONDING", reason="Not responding")
    assert verdict(world(lost, **dead())).kind == "dead"


# -- sickness ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severity", "kind", "action"),
    [
        (Severity.MONITOR, "healthy", ""),
        (Severity.JOB, "healthy", ""),
        (Severity.RESET, "sick", REBOOT),
        (Severity.REBOOT, "sick", REBOOT),
        (Severity.REPLACE, "sick", REPLACE),
    ],
)
def test_findings(severity: Severity, kind: str, action: str) -> None:
    seen = verdict(world(node(), agents=(agent(findings=(finding(severity),)),)))
    assert (seen.kind, seen.action) == (kind, action)


def test_the_gravest_finding_counts_and_the_oldest_of_equals() -> None:
    found = (
        finding(Severity.REBOOT, text="reboot me"),
        finding(Severity.REPLACE, text="later", at=20.0),
        finding(Severity.REPLACE, text="first", at=10.0),
    )
    seen = verdict(world(node(), agents=(agent(findings=found),)))
    assert (seen.action, seen.reason) == (REPLACE, "xid: first")


def test_a_finding_that_a_person_answered_is_settled_for_that_boot() -> None:
    known = finding(subject="0000:04:00", code="79")
    answered = {"n1": {("boot-1", *known.key): 1000.0}}
    for at in (0.0, 1000.0, 1060.0):
        old = agent(findings=(finding(subject="0000:04:00", code="79", at=at),))
        assert verdict(world(node(), agents=(old,), acknowledged=answered)).kind == "healthy"
    other = agent(findings=(finding(subject="0000:05:00", code="79"),))
    assert verdict(world(node(), agents=(other,), acknowledged=answered)).kind == "sick"
    again = agent(boot_id="boot-2", findings=(known,))
    assert verdict(world(node(), agents=(again,), acknowledged=answered)).kind == "sick"


def test_what_the_kernel_writes_once_more_counts_again_and_what_a_check_still_finds_does_not() -> (
    None
):
    later = finding(subject="0000:04:00", code="79", at=1061.0)
    answered = {"n1": {("boot-1", *later.key): 1000.0}}
    new = agent(findings=(later,))
    assert verdict(world(node(), agents=(new,), acknowledged=answered)).kind == "sick"
    # A check finds the same in each round, with a new time.
    for verdicts in ("judged", "unjudged"):
        held = msgspec.structs.replace(new, **{verdicts: ("xid",)})
        assert verdict(world(node(), agents=(held,), acknowledged=answered)).kind == "healthy"


def test_a_clock_that_is_set_makes_no_new_line_of_an_old_one() -> None:
    """A node booted with a wrong date, and its sresd is restarted once the date is right."""
    first = finding(subject="0000:04:00", code="79", at=NOW - 7200.0, uptime=30.0)
    answered = {"n1": agent(findings=(first,)).faults_of_boot()}
    for at, uptime, kind in (
        (NOW - 3600.0, 30.0, "healthy"),
        (NOW - 3000.0, 630.0, "sick"),
        (NOW - 3000.0, 0.0, "healthy"),  # an older sresd does not know
    ):
        read = agent(findings=(msgspec.structs.replace(first, at=at, uptime=uptime),))
        assert verdict(world(node(), agents=(read,), acknowledged=answered)).kind == kind
    # An answer of an earlier release is a date.
    dated = {"n1": {("boot-1", *first.key): NOW - 3600.0}}
    same = agent(findings=(msgspec.structs.replace(first, at=NOW - 3600.0),))
    assert verdict(world(node(), agents=(same,), acknowledged=dated)).kind == "healthy"


def test_a_dead_node_is_dead_whatever_it_said_before() -> None:
    last_words = agent(silence=6.0, findings=(finding(Severity.REBOOT),))
    seen = world(node(), agents=(last_words,), probes={"n1": probes("silent", "silent")})
    assert verdict(seen).kind == "dead"


@pytest.mark.parametrize(
    ("ago", "more", "is_marked"),
    [
        (8.0, {}, True),
        (8.0, {"injected": False}, False),
        (8.0, {"check": "xid"}, False),
        (3600.0, {}, False),
    ],
)
def test_a_silence_that_was_announced_is_marked_as_injected(
    ago: float, more: dict[str, object], is_marked: bool
) -> None:
    announced = {"check": "injected", "code": "node-crash", "injected": True, "at": NOW - ago}
    words = (finding(Severity.MONITOR, **(announced | more)),)
    for silence, tried in ((1.6, ()), (6.0, probes("silent", "silent"))):
        agents = (agent(silence=silence, findings=words),)
        seen = verdict(world(node(), agents=agents, probes={"n1": tried}))
        assert seen.kind in ("suspect", "dead")
        assert seen.reason.endswith(" (injected)") == is_marked
    alive = verdict(world(node(), agents=(agent(findings=words),)))
    assert (alive.kind, alive.reason.endswith("(injected)")) == ("healthy", False)


# -- people's words ---------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["IDLE+FAIL", "IDLE+DRAIN", "DOWN", "ALLOCATED+FAIL"])
@pytest.mark.parametrize("action", [REPLACE, REBOOT])
def test_an_exact_reason_is_a_request(state: str, action: str) -> None:
    seen = verdict(world(node(state=state, reason=action), agents=(agent(),)))
    assert (seen.kind, seen.action) == ("requested", action)


@pytest.mark.parametrize(
    "reason", ["action:replace", "Action: Replace", "Action:Replace.", "Action:Replace ", "disk"]
)
def test_any_other_reason_holds_the_node(reason: str) -> None:
    sick = agent(findings=(finding(),))
    seen = verdict(world(node(state="IDLE+DRAIN", reason=reason), agents=(sick,)))
    assert (seen.kind, seen.action) == ("held", "")


def test_a_near_miss_is_told_with_its_correction() -> None:
    seen = verdict(world(node(state="IDLE+FAIL", reason="action:replace.")))
    assert "write exactly Action:Replace" in seen.reason


def test_slurms_own_reason_does_not_hide_sickness() -> None:
    drained = node(state="IDLE+DRAIN", reason="Kill task failed")
    assert verdict(world(drained, agents=(agent(),))).kind == "down"
    assert verdict(world(drained, agents=(agent(findings=(finding(),)),))).kind == "sick"


def test_an_asked_for_node_that_dies_with_jobs_is_dead_and_keeps_the_wish() -> None:
    lost = node(state="ALLOCATED+FAIL", reason=REBOOT)
    seen = verdict(world(lost, jobs=(job(),), **dead()))
    assert (seen.kind, seen.action) == ("dead", REBOOT)


def test_an_asked_for_node_without_jobs_may_be_silent() -> None:
    """It is often asked for because it is dead; ten such wishes are no blast."""
    seen = verdict(world(node(state="IDLE+FAIL", reason=REPLACE), **dead()))
    assert seen.kind == "requested"


def test_a_held_node_that_dies_with_jobs_is_dead_without_an_action() -> None:
    seen = verdict(world(node(state="ALLOCATED+DRAIN", reason="new disk"), **dead()))
    assert (seen.kind, seen.action) == ("dead", "")


@pytest.mark.parametrize(("state", "reason"), [("DRAIN", "new disk"), ("FAIL", REPLACE)])
def test_a_node_out_of_service_is_probed_while_jobs_are_on_it(state: str, reason: str) -> None:
    """Else its silence would never be known for death."""
    silent = (agent(silence=3.0),)
    occupied = node(state=f"ALLOCATED+{state}", reason=reason)
    assert verdict(world(occupied, agents=silent)).probe
    assert not verdict(world(node(state=f"IDLE+{state}", reason=reason), agents=silent)).probe


def test_a_drained_node_that_is_switched_off_stays_held() -> None:
    seen = verdict(world(node(state="IDLE+DRAIN", reason="new disk"), **dead()))
    assert seen.kind == "held"


def test_a_dead_node_that_is_down_already_stays_held() -> None:
    seen = verdict(world(node(state="DOWN", reason="new disk"), **dead()))
    assert seen.kind == "held"


@pytest.mark.parametrize(
    "state",
    [
        "IDLE+CLOUD+POWERED_DOWN",
        "IDLE+POWERING_DOWN",
        "IDLE+POWERING_UP",
        "FUTURE",
        "DOWN+DRAIN+REBOOT_ISSUED",
        "IDLE+REBOOT_ISSUED+NOT_RESPONDING",
        "IDLE+MAINTENANCE+RESERVED",
    ],
)
def test_silence_that_slurm_expects_is_no_death(state: str) -> None:
    assert verdict(world(node(state=state), **dead())).kind == "held"


def test_a_request_for_a_node_that_stays_powered_down_is_heard() -> None:
    """Slurm wakes no node that is out of service: what a failed power-up left, for one."""
    for state in ("DOWN+FAIL+POWERED_DOWN", "IDLE+FAIL+NOT_RESPONDING+POWERED_DOWN"):
        assert verdict(world(node(state=state, reason=REPLACE), **dead())).kind == "requested"
    for state in ("IDLE+FAIL+POWERED_DOWN+POWER_UP", "DOWN+FAIL+POWERING_DOWN"):
        assert verdict(world(node(state=state, reason=REPLACE), **dead())).kind == "held"
    off = node(state="DOWN+FAIL+POWERED_DOWN", reason="ResumeTimeout reached")
    assert verdict(world(off, **dead())).kind == "held"


def test_a_node_in_maintenance_that_still_has_jobs_may_die() -> None:
    assert verdict(world(node(state="ALLOCATED+MAINTENANCE"), **dead())).kind == "dead"


def test_every_node_gets_one_verdict() -> None:
    seen = world(node(), **dead())
    assert set(diagnose(seen, config())) == set(seen.nodes)


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "DOWN", "IDLE+FAIL", "ALLOCATED+FAIL", "IDLE"])
@pytest.mark.parametrize("reason", [REPLACE, "Not responding", "vendor on site"])
def test_a_reason_that_is_not_understood_holds_the_node(state: str, reason: str) -> None:
    """Dead, sick or silent: nothing is done to it, and its reason is told."""
    unclear = node(state=state, reason=reason, reason_unclear=True)
    sick = agent(findings=(finding(Severity.REPLACE),))
    for seen in (verdict(world(unclear, **dead())), verdict(world(unclear, agents=(sick,)))):
        assert (seen.kind, seen.action, seen.probe) == ("held", "", False)
        assert "cannot be read for certain" in seen.reason and reason in seen.reason


def test_what_slurm_writes_behind_a_blank_reason_is_its_own() -> None:
    seen = verdict(world(node(state="DOWN", reason="  : Not responding"), agents=(agent(),)))
    assert seen.kind == "down"
    kept = verdict(world(node(state="DOWN", reason="vendor : Not responding"), agents=(agent(),)))
    assert kept.kind == "held"


@pytest.mark.parametrize(
    ("reason", "by", "kind"),
    [
        ("Not responding", "root", "down"),
        ("Not responding", "slurm", "down"),
        ("Not responding", "64030", "down"),
        ("Not responding", "alice", "held"),
        ("Not responding since Tuesday, vendor called", "root", "held"),
        ("Low RealMemory (reported:900 < 100.00% of configured:1000)", "root", "down"),
        ("Low socket*core*thread count, Low CPUs", "slurm", "down"),
        ("Low voltage on PSU 2", "root", "held"),
        ("gres/gpu count reported lower than configured (7 < 8)", "slurm", "down"),
        ("gres/gpu: keep out, card 3 is on its way back", "root", "held"),
        ("Kill task failed", "root", "down"),
        ("Kill task failed, look at it", "root", "held"),
        ("Powered down after SuspendTimeout", "root", "down"),
    ],
)
def test_slurms_own_is_one_of_its_texts_set_by_its_own_user(
    reason: str, by: str, kind: str
) -> None:
    seen = world(
        node(state="IDLE+DRAIN", reason=reason, reason_by=by),
        agents=(agent(),),
        slurm_users=SLURM_USERS | {"64030"},
    )
    assert verdict(seen).kind == kind


@pytest.mark.parametrize(
    ("reason", "by", "written"),
    [
        ("Not responding", "alice", "Not responding (by alice)"),
        ("Not responding", "", "Not responding (by an unknown user)"),
        ("Not responding", "slurm", "Not responding"),
        ("bad fan", "alice", "bad fan"),
    ],
)
def test_a_persons_reason_stays_a_persons_when_it_is_written_once_more(
    reason: str, by: str, written: str
) -> None:
    """Its jobs are freed by a DOWN, and Slurm takes a reason with it: then the author is root."""
    held = node(state="IDLE+DRAIN", reason=reason, reason_by=by)
    assert persons_reason(held) == written
    rewritten = node(state="DOWN+DRAIN", reason=written, reason_by="root")
    assert is_a_persons(rewritten) == is_a_persons(held)


STATES = tuple(
    "+".join((base, *flags))
    for base in ("IDLE", "ALLOCATED", "MIXED", "DOWN", "UNKNOWN", "FUTURE", "ERROR")
    for flags in ((), ("DRAIN",), ("FAIL",), ("NOT_RESPONDING",), ("COMPLETING",), ("RESERVED",))
)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("reason", ["", REPLACE, "new disk"])
def test_a_plain_node_is_diagnosed_as_all_rules_would(
    state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are left out for nearly every node: none of them may have had an answer."""
    shown = node(state=state, reason=reason)
    sick = finding(Severity.REPLACE)
    agents = (agent(), agent(silence=900), agent(findings=(sick,)), agent(said_goodbye=True))
    snapshots = [world(shown), *(world(shown, agents=(one,)) for one in agents)]
    snapshots.append(world(msgspec.structs.replace(shown, reason_unclear=True), agents=(agent(),)))
    short = [diagnose(seen, config()) for seen in snapshots]
    monkeypatch.setattr(diagnose_module, "is_plain", lambda _: False)
    assert [diagnose(seen, config()) for seen in snapshots] == short
