"""The log of a job that runs again names the fault it was requeued for."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.errors import WireError
from slurm_resilience.model import Job
from slurm_resilience.resume import requeue_report
from slurm_resilience.resume.decide.classify import Ending
from slurm_resilience.resume.history import AttemptHistory, PastAttempt

JOB = Job(7, uid=0, state="RUNNING", nodes=("n1", "n2"), restarts=1)


def event(kind: str, text: str = "", job: int = 7, at: float = 90.0) -> dict[str, Any]:
    return {"kind": kind, "text": text, "job": job, "at": at}


def newest_first(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return list(reversed(events))


STARTED = event("attempt-started")


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], None),
        ([STARTED, event("requeue", "n3: no beat"), event("requeued")], "n3: no beat"),
        # The requeue that was done follows from the one that was asked for.
        (
            [STARTED, event("requeue-asked", "n3: Xid 79"), event("requeue", "its reason")],
            "n3: Xid 79",
        ),
        # Another job's, and one of an earlier start, of which this start knows nothing.
        ([STARTED, event("requeue", "n9", job=8)], None),
        ([event("requeue", "n3: no beat"), event("requeued"), STARTED], None),
    ],
)
def test_the_fault_is_found_in_the_journal(events: list[dict[str, Any]], text: str | None) -> None:
    cause = requeue_report.cause_of(newest_first(*events), 7)
    assert (cause and cause["text"]) == text


class Link:
    """sresctld's journal, or its absence."""

    def __init__(self, events: list[dict[str, Any]] | None) -> None:
        self._events = events

    def history(self) -> list[dict[str, Any]]:
        if self._events is None:
            raise WireError("no answer")
        return self._events


def written(
    capfd: pytest.CaptureFixture[str],
    events: list[dict[str, Any]] | None,
    step: int,
    cause: str = "",
) -> str:
    link: Any = Link(events)
    history = AttemptHistory(None, 7, 1, ())
    ending = Ending(1, 60.0, False, "RUNNING", ended_at=98.0)
    history.attempts.append(PastAttempt(1, 0, ("n1",), 0.0, ending, cause, step, 38.0))
    requeue_report.tell(link, JOB, history, now=100.0)
    return capfd.readouterr().err


def test_the_block_says_what_failed(capfd: pytest.CaptureFixture[str]) -> None:
    text = written(capfd, newest_first(STARTED, event("requeue", "n3: no beat for 4.2 s")), 120)
    assert "sres: ──── requeued: start number 2" in text
    assert "sres: what failed   n3: no beat for 4.2 s\n" in text
    assert "sres: what was done the job was requeued; now on n[1-2]\n" in text
    assert "sres: how long      10.0 s" in text
    assert "goes on from step 120 (the last one reported)" in text


@pytest.mark.parametrize("events", [[], None])
def test_without_a_cause_one_line_is_left(
    capfd: pytest.CaptureFixture[str], events: list[dict[str, Any]] | None
) -> None:
    text = written(capfd, events, -1)
    assert text.count("\n") == 1
    assert text.endswith("the job was requeued: this is its start number 2\n")


def test_without_sresctld_the_attempts_of_this_srun_tell(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = written(capfd, None, 7, "n3: Slurm shows DOWN")
    assert "sres: what failed   n3: Slurm shows DOWN\n" in text
    assert "sres: how long      2.0 s" in text
    assert "sres: what was lost 38 s of work at most: attempt 1 reported no checkpoint\n" in text
    assert "goes on from step 7 (the last one reported)" in text
