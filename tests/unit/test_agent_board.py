"""A report holds only news, and everything after a reconnect."""

from __future__ import annotations

from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.health.grouping import GroupingChange
from slurm_resilience.model import CheckResult, Finding, Severity


def finding(check: str = "disk", subject: str = "/", code: str = "") -> Finding:
    return Finding(check, Severity.MONITOR, "text", 1.0, subject, code)


def result(verdict: str, *findings: Finding, text: str = "") -> CheckResult:
    return CheckResult("disk", verdict, text, findings)  # type: ignore[arg-type]


def test_only_changes_are_news() -> None:
    rings: list[int] = []
    board = Outbox(lambda: rings.append(1))
    assert board.result(result("pass", text="10 %"))
    assert not board.result(result("pass", text="11 %"))
    report = board.take()
    assert report is not None
    assert [r.verdict for r in report.results] == ["pass"]
    assert board.take() is None
    assert len(rings) == 1


def test_a_finding_of_a_check_that_is_gone_is_taken_back() -> None:
    board = Outbox()
    board.result(result("fail", finding()))
    board.take()
    board.result(result("pass"))
    report = board.take()
    assert report is not None
    assert report.cleared == (("disk", "/", ""),)


def test_an_unjudged_run_takes_nothing_back() -> None:
    board = Outbox()
    board.result(result("fail", finding()))
    board.take()
    board.result(result("unjudged"))
    report = board.take()
    assert report is not None
    assert report.cleared == ()
    assert board.take_all().findings == (finding(),)
    board.result(result("pass"))
    assert board.take_all().findings == ()


def test_a_graver_line_replaces_the_finding_it_grew_from() -> None:
    board = Outbox()
    first, graver = finding("xid", "gpu", "13"), finding("xid", "gpu", "109")
    board.change(GroupingChange((), first))
    board.take()
    board.change(GroupingChange((), graver, (first.key,)))
    report = board.take()
    assert report is not None
    assert (report.findings, report.cleared) == ((graver,), (first.key,))
    everything = board.take_all()
    assert everything.full
    assert everything.findings == (graver,)


def test_taking_back_what_was_never_said_is_silent() -> None:
    board = Outbox()
    board.change(GroupingChange((), None, (("xid", "gpu", "163"),)))
    assert board.take() is None


def test_a_note_is_said_once() -> None:
    board = Outbox()
    board.note(finding("fence"))
    assert board.take_all().findings == (finding("fence"),)
    assert board.take_all().findings == ()


def test_a_reset_gpu_is_healed_of_what_a_reset_heals() -> None:
    board = Outbox()
    reset = Finding("xid", Severity.RESET, "t", 1.0, "gpu", "48")
    lost = Finding("xid", Severity.REBOOT, "t", 1.0, "gpu", "79")
    other = Finding("xid", Severity.RESET, "t", 1.0, "other", "48")
    for one in (reset, lost, other):
        board.change(GroupingChange((), one))
    board.take()
    board.change(GroupingChange((), recovered="gpu"))
    report = board.take()
    assert report is not None
    assert report.cleared == (reset.key,)
    assert board.take_all().findings == (lost, other)
