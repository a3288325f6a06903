"""A report holds only news, and everything after a reconnect."""

from __future__ import annotations

from slurm_resilience.agent.outbox import MAX_WATCHED, Outbox
from slurm_resilience.health.grouping import GroupingChange
from slurm_resilience.model import CheckResult, Finding, Severity


def finding(check: str = "disk", subject: str = "/", code: str = "") -> Finding:
    return Finding(check, Severity.MONITOR, "text", 1.0, subject, code)


def result(verdict: str, *findings: Finding, text: str = "") -> CheckResult:
    return CheckResult("disk", verdict, text, findings)  # type: ignore[arg-type]


def test_only_changes_are_news() -> None:
    rings: list[int] = []
    outbox = Outbox(lambda: rings.append(1))
    assert outbox.result(result("pass", text="10 %"))
    assert not outbox.result(result("pass", text="11 %"))
    report = outbox.take()
    assert report is not None
    assert [r.verdict for r in report.results] == ["pass"]
    assert outbox.take() is None
    assert len(rings) == 1


def test_a_finding_of_a_check_that_is_gone_is_taken_back() -> None:
    outbox = Outbox()
    outbox.result(result("fail", finding()))
    outbox.take()
    outbox.result(result("pass"))
    report = outbox.take()
    assert report is not None
    assert report.cleared == (("disk", "/", ""),)


def test_an_unjudged_run_takes_nothing_back() -> None:
    outbox = Outbox()
    outbox.result(result("fail", finding()))
    outbox.take()
    outbox.result(result("unjudged"))
    report = outbox.take()
    assert report is not None
    assert report.cleared == ()
    assert outbox.take_all().findings == (finding(),)
    outbox.result(result("pass"))
    assert outbox.take_all().findings == ()


def test_a_graver_line_replaces_the_finding_it_grew_from() -> None:
    outbox = Outbox()
    first, graver = finding("xid", "gpu", "13"), finding("xid", "gpu", "109")
    outbox.change(GroupingChange((), first))
    outbox.take()
    outbox.change(GroupingChange((), graver, (first.key,)))
    report = outbox.take()
    assert report is not None
    assert (report.findings, report.cleared) == ((graver,), (first.key,))
    everything = outbox.take_all()
    assert everything.full
    assert everything.findings == (graver,)


def test_taking_back_what_was_never_said_is_silent() -> None:
    outbox = Outbox()
    outbox.change(GroupingChange((), None, (("xid", "gpu", "163"),)))
    assert outbox.take() is None


def test_a_note_is_said_once() -> None:
    outbox = Outbox()
    outbox.note(finding("fence"))
    assert outbox.take_all().findings == (finding("fence"),)
    assert outbox.take_all().findings == ()


def test_a_reset_gpu_is_healed_of_what_a_reset_heals() -> None:
    outbox = Outbox()
    reset = Finding("xid", Severity.RESET, "t", 1.0, "gpu", "48")
    lost = Finding("xid", Severity.REBOOT, "t", 1.0, "gpu", "79")
    other = Finding("xid", Severity.RESET, "t", 1.0, "other", "48")
    for one in (reset, lost, other):
        outbox.change(GroupingChange((), one))
    outbox.take()
    outbox.change(GroupingChange((), recovered="gpu"))
    report = outbox.take()
    assert report is not None
    assert report.cleared == (reset.key,)
    assert outbox.take_all().findings == (lost, other)


def test_what_is_only_watched_is_bounded_and_hides_no_fault() -> None:
    outbox = Outbox()
    fault = Finding("xid", Severity.REBOOT, "text", 1.0, "0000:3b:00", "79")
    outbox.change(GroupingChange((), fault))
    for number in range(2 * MAX_WATCHED):
        outbox.change(GroupingChange((), finding("lockup", f"task{number}")))
    report = outbox.take()
    assert report is not None
    assert report.findings[0] == fault
    assert len(report.findings) == MAX_WATCHED + 1
    assert report.findings[-1].subject == f"task{2 * MAX_WATCHED - 1}"
    outbox.change(GroupingChange((), finding("lockup", "another")))
    news = outbox.take()
    assert news is not None
    assert news.cleared == (("lockup", f"task{MAX_WATCHED}", ""),)
    assert len(outbox.take_all().findings) == MAX_WATCHED + 1


def test_the_node_has_been_looked_at_once_each_check_has_come_to_an_end() -> None:
    outbox = Outbox()
    outbox.result(result("pass"))
    assert not outbox.take_all().checked  # which checks there are is not known yet
    outbox.expect(("disk", "memory"))
    assert not outbox.take_all().checked
    outbox.result(CheckResult("memory", "unjudged", "no answer within 10 s"))
    report = outbox.take()
    assert report is not None and report.checked
    assert outbox.take_all().checked
