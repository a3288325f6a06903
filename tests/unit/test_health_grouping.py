"""Several lines, one trouble."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.health import xid
from slurm_resilience.health.grouping import WINDOW_SECONDS, FindingGroup, absorb, group
from slurm_resilience.model import SEVERITIES, Finding, Severity


def seen(code: int, at: float = 0.0, gpu: str = "0000:3b:00", injected: bool = False) -> Finding:
    row = xid.judge(code, "")
    return Finding(
        "xid", row.action, f"Xid {code}", at, subject=gpu, code=str(code), injected=injected
    )


def switch(at: float, name: str = "0000:05:00", fatal: bool = True) -> Finding:
    severity = Severity.RESET if fatal else Severity.MONITOR
    return Finding("sxid", severity, "SXid 20034", at, subject=name, code="20034")


def test_one_memory_error_is_one_incident() -> None:
    (one,) = group([seen(48, 0.0), seen(63, 0.023), seen(94, 0.025)])
    assert one.lead.severity is Severity.RESET
    assert one.codes == ("48", "63", "94")


def test_a_failed_remap_makes_it_a_replacement() -> None:
    (one,) = group([seen(48), seen(64, 0.1)])
    assert one.lead.severity is Severity.REPLACE


def test_a_lost_gpu_takes_its_switches_with_it() -> None:
    (one,) = group([seen(79, 0.0, "0000:91:00"), *(switch(12.0, f"0000:0{n}:00") for n in "567")])
    assert one.lead.code == "79"
    assert one.lines == 4


def test_switch_errors_alone_are_their_own() -> None:
    assert len(group([switch(0.0, "0000:05:00"), switch(0.1, "0000:06:00")])) == 2


def test_two_gpus_are_two_incidents() -> None:
    assert len(group([seen(79, 0.0, "0000:91:00"), seen(79, 0.1, "0000:92:00")])) == 2


def test_the_same_line_again_says_nothing_new() -> None:
    first = absorb((), seen(13))
    assert first.report is not None
    again = absorb(first.incidents, seen(13, 1.0))
    assert again.report is None
    assert again.incidents[0].lines == 2


def test_after_a_quiet_time_it_is_news_again() -> None:
    first = absorb((), seen(13))
    assert absorb(first.incidents, seen(13, WINDOW_SECONDS + 1)).report is not None


def test_getting_graver_is_reported_and_takes_the_old_finding_back() -> None:
    change = absorb(absorb((), seen(13)).incidents, seen(109, 5.0))
    assert change.report is not None
    assert (change.report.code, change.report.text) == ("109", "Xid 109 (after 13)")
    assert change.cleared == (("xid", "0000:3b:00", "13"),)


def test_45_never_acts() -> None:
    alone = absorb((), seen(45))
    assert (alone.incidents, alone.report) == ((), None)
    follows = absorb(absorb((), seen(48)).incidents, seen(45, 0.1))
    assert follows.report is None
    assert follows.incidents[0].codes == ("48", "45")


def test_162_takes_163_back() -> None:
    change = absorb(absorb((), seen(163)).incidents, seen(162, 500.0))
    assert change.incidents == ()
    assert change.cleared == (("xid", "0000:3b:00", "163"),)


def test_the_driver_says_when_a_reset_has_helped() -> None:
    back = Finding("xid", Severity.NONE, "Xid 154", 9.0, subject="0000:3b:00", code="154")
    healed = absorb(absorb((), seen(48)).incidents, back)
    assert (healed.incidents, healed.recovered) == ((), "0000:3b:00")
    assert len(absorb(absorb((), seen(79)).incidents, back).incidents) == 1


def driver_asks(words: str, at: float) -> Finding:
    text = f"GPU recovery action changed from 0x0 (None) to 0x1 ({words})"
    row = xid.judge(154, text)
    return Finding("xid", row.action, "Xid 154", at, subject="0000:3b:00", code="154")


def test_the_drivers_word_comes_before_the_table() -> None:
    milder = absorb(absorb((), seen(79)).incidents, driver_asks("GPU Reset Required", 0.1))
    assert milder.report is not None
    assert (milder.report.code, milder.report.severity) == ("154", "reset")
    assert milder.cleared == (("xid", "0000:3b:00", "79"),)
    graver = absorb(absorb((), seen(48)).incidents, driver_asks("Node Reboot Required", 0.1))
    assert graver.report is not None
    assert graver.report.severity == "reboot"


def test_the_driver_knows_no_replacement() -> None:
    change = absorb(absorb((), seen(64)).incidents, driver_asks("GPU Reset Required", 0.1))
    assert change.report is None
    assert change.incidents[0].lead.code == "64"


def test_a_file_server_that_answers_takes_its_silence_back() -> None:
    silent = Finding("nfs", Severity.MONITOR, "x", 0.0, subject="10.0.0.7", code="not_responding")
    other = msgspec.structs.replace(silent, subject="10.0.0.8")
    answer = msgspec.structs.replace(silent, severity=Severity.NONE, code="answers", at=500.0)
    open_now = absorb(absorb((), silent).incidents, other).incidents
    assert len(open_now) == 2
    change = absorb(open_now, msgspec.structs.replace(answer, at=1.0))
    assert change.cleared == (("nfs", "10.0.0.7", "not_responding"),)
    assert [one.lead.subject for one in change.incidents] == ["10.0.0.8"]


def test_lines_of_two_checks_without_a_subject_are_two_incidents() -> None:
    panic = Finding("panic", Severity.REBOOT, "x", 0.0, code="panic")
    killed = Finding("oom", Severity.JOB, "x", 0.1, code="killed")
    assert len(group([panic, killed])) == 2


def test_an_injected_line_never_hides_a_real_one() -> None:
    change = absorb(absorb((), seen(79, injected=True)).incidents, seen(79, 0.1))
    assert change.report is not None
    assert len(change.incidents) == 2


FINDINGS = st.builds(
    seen,
    st.integers(1, 200),
    st.integers(0, 300).map(float),
    st.sampled_from(["0000:3b:00", "0000:86:00"]),
)


@given(st.lists(FINDINGS, max_size=30))
def test_no_gravity_is_ever_lost(findings: list[Finding]) -> None:
    findings = sorted(findings, key=lambda finding: finding.at)
    incidents: tuple[FindingGroup, ...] = ()
    told = []
    for finding in findings:
        change = absorb(incidents, finding)
        incidents = change.incidents
        told += [change.report] if change.report else []
    acting = [f for f in findings if f.severity is not Severity.NONE]
    for gpu in {f.subject for f in acting}:
        worst = max(SEVERITIES.index(f.severity) for f in acting if f.subject == gpu)
        assert worst == max(SEVERITIES.index(f.severity) for f in told if f.subject == gpu)
