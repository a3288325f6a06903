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

from slurm_resilience.controller.journal import (
    OPEN_STATES,
    Journal,
    KnownAgent,
    PendingRequeue,
    Supervised,
)
from slurm_resilience.controller.observe import last_run
from slurm_resilience.errors import SresError
from slurm_resilience.model import REPLACE


def test_events_newest_first_of_one_node_or_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state" / "journal.db")
    for number, node in enumerate(("n1", "n2", "n1")):
        journal.event(number, "seen", f"text {number}", node=node, job=number, extra=[number])
    assert [e["text"] for e in journal.events()] == ["text 2", "text 1", "text 0"]
    assert [e["at"] for e in journal.events("n1")] == [2, 0]
    assert journal.events(limit=1)[0]["data"] == {"extra": [2]}
    assert [e["text"] for e in journal.events(after=2)] == ["text 2"]


def test_an_incident_from_open_to_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    first = journal.open_incident("n1", "dead", REPLACE, "silent", 5.0, boot_before="b")
    second = journal.open_incident("n2", "sick", REPLACE, "xid", 6.0)
    assert journal.incidents() == [second, first]
    for state in sorted(OPEN_STATES):
        journal.save(msgspec.structs.replace(first, state=state))
        assert first.id in {known.id for known in journal.incidents()}
    journal.save(msgspec.structs.replace(first, state="closed"))
    assert journal.incidents() == [second]
    assert len(journal.incidents(open_only=False)) == 2


def test_a_new_journal_does_not_give_an_old_runs_number_again(tmp_path: Path) -> None:
    for name in ("3-1", "12-2", "odd", "x-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    journal = Journal(tmp_path / "journal.db")
    journal.number_after(last_run(tmp_path))
    numbers = [journal.open_incident("n1", "dead", REPLACE, "silent", 5.0).id for _ in range(2)]
    assert numbers == [13, 14]
    assert last_run(tmp_path / "nowhere") == 0


def test_only_a_nodes_last_incident_is_given_up(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    first = journal.open_incident("n1", "dead", REPLACE, "silent", 5.0)
    journal.save(msgspec.structs.replace(first, state="gave_up", reason_at="then"))
    assert [known.reason_at for known in journal.gave_up()] == ["then"]
    journal.open_incident("n1", "requested", REPLACE, "again", 6.0)
    assert journal.gave_up() == []


def test_what_is_kept_by_name(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for attempt in (1, 2):
        journal.put_supervised(Supervised(7, 1000, attempt, ("n1",), 1.0))
        journal.put_chase(PendingRequeue(7, "why", True, attempt, 1.0))
        journal.put_agent(KnownAgent("n1", f"boot-{attempt}", "i"))
    assert journal.supervised()[7].attempt == 2
    assert journal.chases()[7].restarts_before == 2
    assert journal.agents()["n1"].boot_id == "boot-2"
    journal.drop_supervised(7)
    journal.drop_chase(7)
    journal.drop_agent("n1")
    assert not journal.supervised() and not journal.chases() and not journal.agents()


def test_a_pause_outlives_us(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.db").pause("by hand")
    journal = Journal(tmp_path / "journal.db")
    assert journal.paused == "by hand"
    journal.pause("")
    assert journal.paused == ""


def test_a_newer_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    Journal(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    with pytest.raises(SresError, match="newer version"):
        Journal(path)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("not a database, not at all" * 100)
    with pytest.raises(SresError, match="cannot be opened"):
        Journal(path)
    with pytest.raises(SresError, match="cannot be opened"):
        Journal(tmp_path)


WRITER = """
import sys
from slurm_resilience.controller.journal import PendingRequeue, Journal
journal = Journal(sys.argv[1])
number = 0
while True:
    number += 1
    journal.open_incident(f"n{number}", "dead", "Action:Replace", "silent", float(number))
    journal.put_chase(PendingRequeue(number, "why", True, 0, 0.0))
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
    assert set(range(1, said[-1] + 1)) <= set(journal.chases())
    again = journal.open_incident("after", "dead", REPLACE, "silent", 1.0)
    assert again.id > said[-1]
