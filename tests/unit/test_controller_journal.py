"""The journal: what it holds survives its writer."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.journal_file import SCHEMA_VERSION
from slurm_resilience.controller.journal.records import (
    CLOSED_BREAKER,
    WRONG_RESULTS,
    BreakerState,
    Fault,
    Incident,
    IncidentFacts,
    KnownAgent,
    MachineIdentity,
    PendingRequeue,
    Supervised,
    UsersWord,
)
from slurm_resilience.controller.observe import last_run
from slurm_resilience.errors import IllegalTransition, SresError
from slurm_resilience.model import REPLACE


def test_events_newest_first_of_one_node_or_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state" / "journal.db")
    for number, node in enumerate(("n1", "n2", "n1")):
        journal.event(number, "seen", f"text {number}", node=node, job=number, extra=[number])
    assert [e["text"] for e in journal.events()] == ["text 2", "text 1", "text 0"]
    assert [e["at"] for e in journal.events("n1")] == [2, 0]
    assert journal.events(limit=1)[0]["data"] == {"extra": [2]}
    assert [e["text"] for e in journal.events(after=2)] == ["text 2"]


def detected(journal: Journal, node: str = "n1", at: float = 5.0) -> Incident:
    return journal.open_incident(
        node, NodeEvent.DETECTED, "dead", REPLACE, "silent", at, MachineIdentity("b")
    )


LIFE = [
    (NodeEvent.MARKED, NodeState.SET_ASIDE),
    (NodeEvent.EMPTIED, NodeState.EMPTY),
    (NodeEvent.REPLACING, NodeState.REPAIRING),
    (NodeEvent.REPLACED, NodeState.VALIDATING),
    (NodeEvent.RESUMED, NodeState.RETURNING),
]


def test_an_incident_from_detected_to_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    first, second = detected(journal), detected(journal, "n2", 6.0)
    assert journal.incidents() == [second, first]
    assert first.before == MachineIdentity("b")
    for at, (event, state) in enumerate(LIFE, 10):
        assert journal.apply(first.id, event, "why", at).state is state
        assert first.id in {known.id for known in journal.incidents()}
        assert journal.state_of("n1") is state
        (newest,) = journal.events("n1", limit=1)
        assert (newest["kind"], newest["text"]) == (event, "why")
        assert newest["data"] == {"state": state}
    closed = journal.apply(first.id, NodeEvent.CLOSED, "back", 20.0)
    assert msgspec.structs.astuple(closed.times) == (5.0, 10.0, 12.0, 13.0, 14.0, 20.0, 0.0, 0.0)
    assert closed.ended_by is NodeEvent.CLOSED
    assert journal.incidents() == [second]
    assert len(journal.incidents(open_only=False)) == 2


def test_what_the_table_lacks_cannot_be_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    known = detected(journal)
    before = journal.events()
    for event in set(NodeEvent) - {
        NodeEvent.MARKED,
        NodeEvent.RECOVERED,
        NodeEvent.REMOVED,
        NodeEvent.TAKEN_OVER,
    }:
        with pytest.raises(IllegalTransition, match="suspect"):
            journal.apply(known.id, event, "no", 9.0)
    with pytest.raises(IllegalTransition):
        detected(journal)
    assert journal.incidents(open_only=False) == [known]
    assert journal.events() == before


def test_facts_of_an_event_stay_with_the_incident(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    number = detected(journal).id
    journal.apply(number, NodeEvent.MARKED, "", 6.0)
    journal.apply(number, NodeEvent.EMPTIED, "", 7.0)
    facts = IncidentFacts(attempts=1, before=MachineIdentity("boot", "machine"))
    journal.apply(number, NodeEvent.REPLACING, "", 8.0, facts)
    facts = IncidentFacts(next_try=99.0, output="no spare")
    failed = journal.apply(number, NodeEvent.REPLACEMENT_FAILED, "exited 1", 9.0, facts)
    assert (failed.attempts, failed.next_try) == (1, 99.0)
    assert failed.before == MachineIdentity("boot", "machine")
    assert journal.events(limit=1)[0]["data"]["output"] == "no spare"
    journal.note_alarm(number)
    assert journal.incident(number).alarmed


def test_what_a_person_answered_holds_for_that_boot(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    found = ("boot-1", "xid", "0000:04:00", "79")
    for _ in range(2):
        journal.acknowledge("n1", {found: 5.0})
    assert Journal(tmp_path / "journal.db").acknowledged() == {"n1": {found: 5.0}}
    journal.forget_boots("n1", "boot-1")
    journal.acknowledge("n1", {found: 7.0})
    assert journal.acknowledged() == {"n1": {found: 7.0}}
    journal.forget_boots("n1", "boot-2")
    assert journal.acknowledged() == {}
    journal.acknowledge("n1", {found: 7.0})
    journal.drop_answers("n1", [found])
    assert journal.acknowledged() == {}


def test_the_last_resume_by_a_person_is_remembered(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for at, kind in ((10.0, "released"), (20.0, "put-back"), (30.0, "closed")):
        journal.event(at, kind, "", node="n1")
    assert journal.released(0.0) == {"n1": 20.0}
    assert journal.released(20.0) == {}


def test_a_node_that_a_person_keeps_is_remembered(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for _ in range(2):
        journal.keep("n1", True)
    assert Journal(tmp_path / "journal.db").kept() == {"n1"}
    journal.keep("n1", False)
    assert journal.kept() == frozenset()


def test_faults_and_the_breaker_outlive_us(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    assert journal.breaker() == CLOSED_BREAKER
    fault, tripped = Fault("n1", "xid 79", ("gpu",), 5.0), BreakerState(7.0, 8.0, "3 nodes")
    journal.put_fault(fault)
    journal.put_breaker(tripped)
    again = Journal(tmp_path / "journal.db")
    assert (again.faults(), again.breaker()) == ({"n1": fault}, tripped)


def test_starts_and_returns_are_counted_from_the_history(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    number = detected(journal).id
    for at, event in enumerate(
        (NodeEvent.MARKED, NodeEvent.EMPTIED, NodeEvent.CAME_BACK, NodeEvent.GONE_AGAIN), 10
    ):
        journal.apply(number, event, "", at, IncidentFacts(is_flap=True))
    journal.apply(number, NodeEvent.REPLACING, "", 20.0)
    assert (journal.flaps(11.0), journal.flaps(12.0)) == ({"n1": 1}, {})
    assert (journal.starts(19.0), journal.starts(20.0)) == (((20.0, "n1"),), ())


def test_a_start_in_which_nothing_was_begun_counts_for_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    number = detected(journal).id
    for at, event in enumerate((NodeEvent.MARKED, NodeEvent.EMPTIED), 10):
        journal.apply(number, event, "", at)
    for attempt, is_unbegun in ((1, False), (2, True), (3, False)):
        at = 20.0 + attempt
        journal.apply(number, NodeEvent.REPLACING, "", at, IncidentFacts(attempts=attempt))
        facts = IncidentFacts(is_unbegun=is_unbegun)
        known = journal.apply(number, NodeEvent.REPLACEMENT_FAILED, "", at, facts)
        assert known.is_unbegun is is_unbegun
    assert (known.unbegun, known.tries) == ((2,), 2)
    assert journal.starts(0.0) == ((21.0, "n1"), (23.0, "n1"))
    assert len(journal.repairs(0.0)) == 1


def test_a_try_without_an_exit_code_is_remembered_until_the_next_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    number = detected(journal).id
    for at, event in enumerate((NodeEvent.MARKED, NodeEvent.EMPTIED, NodeEvent.REPLACING), 10):
        journal.apply(number, event, "", at)
    lost = IncidentFacts(is_end_unknown=True)
    known = journal.apply(number, NodeEvent.REPLACEMENT_FAILED, "", 20.0, lost)
    assert known.is_end_unknown and known.times.run_lost == 20.0
    for event in (NodeEvent.OCCUPIED, NodeEvent.EMPTIED):
        assert journal.apply(number, event, "", 21.0).is_end_unknown
    assert not journal.apply(number, NodeEvent.REPLACING, "", 22.0).is_end_unknown


def test_words_of_trainings_are_found_by_their_node(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for at, uid in ((5.0, 1), (6.0, 2), (7.0, 2)):
        journal.event(at, WRONG_RESULTS, "step 7", node="n1", job=4, uid=uid)
    assert journal.users_words(5.0) == {
        "n1": (UsersWord(WRONG_RESULTS, 4, 2, 6.0), UsersWord(WRONG_RESULTS, 4, 2, 7.0))
    }
    assert [event["text"] for event in journal.events("n1")] == ["step 7"] * 3


def test_more_than_a_thousand_open_incidents_are_all_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for number in range(1100):
        detected(journal, f"n{number}")
    assert len(journal.incidents()) == 1100


def test_a_refused_commit_leaves_no_transaction_open(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")

    def refuse_commit(action: int, argument: str | None, *_: str | None) -> int:
        is_commit = action == sqlite3.SQLITE_TRANSACTION and argument == "COMMIT"
        return sqlite3.SQLITE_DENY if is_commit else sqlite3.SQLITE_OK

    journal._db.set_authorizer(refuse_commit)
    with pytest.raises(sqlite3.Error):
        detected(journal, "n1")
    journal._db.set_authorizer(None)
    assert journal.incidents() == []
    assert detected(journal, "n2").state is NodeState.SUSPECT


def test_a_new_journal_does_not_give_an_old_runs_number_again(tmp_path: Path) -> None:
    for name in ("3-1", "12-2", "odd", "x-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    journal = Journal(tmp_path / "journal.db")
    journal.number_after(last_run(tmp_path))
    numbers = [detected(journal, node).id for node in ("n1", "n2")]
    assert numbers == [13, 14]
    assert last_run(tmp_path / "nowhere") == 0


def test_only_a_nodes_last_incident_is_at_rest(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    number = detected(journal).id
    for event, _ in LIFE:
        journal.apply(number, event, "", 6.0)
    journal.apply(number, NodeEvent.GAVE_UP, "", 7.0, IncidentFacts(reason_at="then"))
    assert [known.reason_at for known in journal.at_rest()] == ["then"]
    journal.open_incident("n1", NodeEvent.REQUESTED, "requested", REPLACE, "again", 8.0)
    assert journal.at_rest() == []


def test_what_is_kept_by_name(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for attempt in (1, 2):
        journal.put_supervised(Supervised(7, 1000, attempt, ("n1",), 1.0))
        journal.put_pending_requeue(PendingRequeue(7, "why", True, attempt, 1.0))
        journal.put_agent(KnownAgent("n1", f"boot-{attempt}", "i"))
    assert journal.supervised()[7].attempt == 2
    assert journal.pending_requeues()[7].restarts_before == 2
    assert journal.agents()["n1"].boot_id == "boot-2"
    journal.drop_supervised(7)
    journal.drop_pending_requeue(7)
    journal.drop_agent("n1")
    assert not journal.supervised() and not journal.pending_requeues() and not journal.agents()


def test_a_pause_outlives_us(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.db").pause("by hand")
    journal = Journal(tmp_path / "journal.db")
    assert journal.paused == "by hand"
    journal.pause("")
    assert journal.paused == ""


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, 99])
def test_a_journal_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "journal.db"
    Journal(path).close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version={version}")
    with pytest.raises(SresError, match=f"has version {version}.* or move the file away"):
        Journal(path)


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_a_removed_file_is_noticed(tmp_path: Path, name: str) -> None:
    """Writes from then on would be lost with this process."""
    journal = Journal(tmp_path / "journal.db")
    journal.event(1.0, "note", "a text")
    assert journal.is_in_place
    (tmp_path / name).unlink()
    assert not journal.is_in_place


def test_a_journal_is_opened_without_a_write(tmp_path: Path) -> None:
    """A question about the past must be answered also while the disk is full."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.event(1.0, "note", "a text")
    journal._db.execute("BEGIN IMMEDIATE")  # whatever writes now is refused
    reading = Journal(path, lambda name: sqlite3.connect(name, isolation_level=None, timeout=0))
    assert [event["text"] for event in reading.events()] == ["a text"]
    journal._db.execute("ROLLBACK")


def test_a_journal_of_another_cluster_is_refused(tmp_path: Path) -> None:
    """A copied state directory, say: its incidents are of other nodes with the same names."""
    for cluster in ("blue", "blue", "green"):
        journal = Journal(tmp_path / "journal.db")
        if cluster == "green":
            with pytest.raises(SresError, match="of cluster blue, and Slurm here is cluster green"):
                journal.claim(cluster)
        else:
            journal.claim(cluster)
        journal.close()


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("not a database, not at all" * 100)
    with pytest.raises(SresError, match="cannot be opened"):
        Journal(path)
    with pytest.raises(SresError, match="cannot be opened"):
        Journal(tmp_path)


WRITER = """
import sys
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import PendingRequeue
journal = Journal(sys.argv[1])
number = 0
while True:
    number += 1
    journal.open_incident(
        f"n{number}", NodeEvent.DETECTED, "dead", "Action:Replace", "silent", float(number)
    )
    journal.put_pending_requeue(PendingRequeue(number, "why", True, 0, 0.0))
    print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_had_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if line.strip() == "20":
            os.kill(writer.pid, signal.SIGKILL)
            break
    said = [int(line) for line in writer.stdout.read().split()] or [20]
    writer.wait()
    journal = Journal(path)
    written = {incident.node for incident in journal.incidents()}
    assert {f"n{number}" for number in range(1, said[-1] + 1)} <= written
    assert set(range(1, said[-1] + 1)) <= set(journal.pending_requeues())
    again = detected(journal, "after")
    assert again.id > said[-1]
