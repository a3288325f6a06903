"""Evidence before a node is given away: kept once, privately, and never waited for without end."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from worlds import NOW, FakeClock, finding

from slurm_resilience.config import ReplaceSettings
from slurm_resilience.controller.act import evidence_collector
from slurm_resilience.controller.act.evidence_collector import (
    EvidenceCollector,
    prune_evidence,
    report_wait,
)
from slurm_resilience.controller.act.reporting import Reporter
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import last_run
from slurm_resilience.errors import WireError
from slurm_resilience.model import REBOOT, REPLACE, RESET, CheckResult
from slurm_resilience.wire.messages import BugReportTold, NodeAnswer, NodeEvidence

FOUND = NodeEvidence(
    ("first", "last"), ("a line",), (), (finding(),), (CheckResult("disk", "pass", "ok"),)
)


def packed(evidence: NodeEvidence) -> NodeAnswer:
    return NodeAnswer(1, msgspec.Raw(msgspec.msgpack.encode(evidence)))


class Site:
    """A collector whose nodes answer when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, FakeClock()
        self.journal = Journal(folder / "journal.db")
        self.asked: list[Callable[[NodeAnswer], None]] = []
        self.refuses = ""
        self.replace: dict[str, Any] = {}
        self.wakes = 0
        self.start()

    def start(self, seconds: float = 10.0) -> None:
        self.collector = EvidenceCollector(
            self.ask,
            self.journal,
            Reporter(self.journal, self.clock),
            self.clock,
            self.folder,
            ReplaceSettings(evidence_timeout=seconds, **self.replace),
            self.wake,
        )

    def wake(self) -> None:
        self.wakes += 1

    def ask(self, node: str, kind: str, body: Any, seconds: float, done: Any) -> None:
        if self.refuses:
            raise WireError(self.refuses)
        self.asked.append(done)

    def open(self) -> Incident:
        return self.journal.open_incident("n1", NodeEvent.DETECTED, "sick", REPLACE, "xid", NOW)

    def settled(self, incident: Incident) -> bool:
        return self.collector.is_settled(self.journal.incident(incident.id))

    def told(self) -> list[str]:
        return [e["text"] for e in self.journal.events("n1") if e["kind"] == "evidence"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_what_the_node_tells_is_kept_privately_and_once(site: Site) -> None:
    incident = site.open()
    site.collector.begin(incident)
    assert not site.settled(incident) and len(site.asked) == 1
    site.asked[0](packed(FOUND))
    assert site.wakes == 1 and site.settled(incident)
    folder = site.folder / "evidence" / str(incident.id)
    assert (folder / "kernel.log").read_text() == "first\nlast\n"
    kept = msgspec.json.decode((folder / "findings.json").read_bytes())
    assert kept["findings"][0]["text"] == "GPU has fallen off the bus"
    assert kept["checks"][0]["check"] == "disk"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert site.journal.incident(incident.id).evidence.startswith(f"{folder}: 2 lines of the ke")
    # Also after a restart it is not asked for again.
    site.start()
    assert site.settled(incident) and len(site.asked) == 1 and len(site.told()) == 1


def test_a_node_that_does_not_answer_is_not_waited_for(site: Site) -> None:
    incident = site.open()
    assert not site.settled(incident)
    site.clock.pass_time(9.9)
    assert not site.settled(incident)
    site.clock.pass_time(0.2)
    assert site.settled(incident) and site.told() == []
    # Its late answer is kept all the same.
    site.asked[0](packed(FOUND))
    site.collector.settle()
    assert len(site.told()) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (NodeAnswer(1, refused="n1 did not answer within 10 s"), "none: n1 did not answer"),
        (NodeAnswer(1, msgspec.Raw(b"\xc3")), "none: sresd's answer cannot be read"),
    ],
)
def test_no_evidence_is_said_once_and_not_waited_for(
    site: Site, answer: NodeAnswer, says: str
) -> None:
    incident = site.open()
    site.collector.begin(incident)
    site.asked[0](answer)
    assert site.settled(incident) and site.settled(incident)
    assert len(site.asked) == 1 and len(site.told()) == 1 and site.told()[0].startswith(says)


def test_a_node_without_connection_delays_nothing(site: Site) -> None:
    site.refuses = "the sresd of n1 is not connected"
    assert site.settled(site.open())
    assert site.told() == ["none: the sresd of n1 is not connected"]


def test_a_full_disk_delays_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evidence_collector, "_write", full)
    incident = site.open()
    site.collector.begin(incident)
    site.asked[0](packed(FOUND))
    assert site.settled(incident)
    assert "No space left on device" in site.told()[0]


def test_zero_seconds_ask_nothing(site: Site) -> None:
    site.start(seconds=0.0)
    assert site.settled(site.open()) and not site.asked


RUNS = msgspec.structs.replace(FOUND, bug_report="runs since 3 s", bug_report_runs=True)


def told_report(text: str) -> NodeAnswer:
    return NodeAnswer(2, msgspec.Raw(msgspec.msgpack.encode(BugReportTold(text))))


@pytest.mark.parametrize(
    ("action", "directory", "waits"),
    [
        (REBOOT, "", 60.0),
        (REBOOT, "/shared", 60.0),
        (REPLACE, "/shared", 60.0),
        (REPLACE, "", 0.0),
        (RESET, "/shared", 0.0),
    ],
)
def test_only_what_would_lose_a_bug_report_waits_for_it(
    action: str, directory: str, waits: float
) -> None:
    settings = ReplaceSettings(evidence_directory=directory)
    assert report_wait(action, settings) == waits
    assert report_wait(action, ReplaceSettings(bug_report_wait=0.0)) == 0.0


def awaiting_a_report(site: Site) -> Incident:
    """Return the incident of a node whose bug report is being written, and copied afterwards."""
    site.replace = {"evidence_directory": "/shared"}
    site.start()
    incident = site.open()
    site.collector.begin(incident)
    site.asked[0](packed(RUNS))
    assert not site.settled(incident)
    return incident


def test_a_replacement_waits_for_the_copy_of_a_bug_report(site: Site) -> None:
    incident = awaiting_a_report(site)
    assert len(site.asked) == 2
    site.clock.pass_time(59.0)
    assert not site.settled(incident)
    site.asked[1](told_report("/x.log.gz; copied to /shared/x.log.gz"))
    assert site.settled(incident) and site.wakes == 2
    assert "2 lines of the kernel log" in site.told()[0]
    assert site.told()[0].endswith("bug report: /x.log.gz; copied to /shared/x.log.gz")


def test_no_replacement_waits_for_a_bug_report_beyond_its_bound(site: Site) -> None:
    incident = awaiting_a_report(site)
    site.clock.pass_time(60.0)
    assert site.settled(incident)
    # A late word is kept all the same, also that there is none.
    site.asked[1](NodeAnswer(2, refused="the connection to n1 was lost"))
    site.collector.settle()
    assert site.told()[0].endswith("bug report: none: the connection to n1 was lost")


def test_a_report_that_nobody_copies_delays_no_replacement(site: Site) -> None:
    incident = site.open()
    site.collector.begin(incident)
    site.asked[0](packed(RUNS))
    assert site.settled(incident)


def test_an_older_sresd_that_knows_no_bug_report_delays_nothing(site: Site) -> None:
    incident = awaiting_a_report(site)
    site.asked[1](NodeAnswer(2, refused="sresd 0.1 does not know 'await-bug-report'"))
    assert site.settled(incident)


def test_old_evidence_goes_with_its_incident(site: Site) -> None:
    for number in ("7", "8", "9.new"):
        (site.folder / "evidence" / number).mkdir(parents=True)
    prune_evidence(site.folder, 0.0, lambda number: False)
    assert last_run(site.folder) == 8
    prune_evidence(site.folder, 1e12, lambda number: number == 7)
    assert [path.name for path in (site.folder / "evidence").iterdir()] == ["7"]
