"""The goodput of a supervised program, and its time lost by cause, as they are said at its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume import report
from slurm_resilience.resume.decide.classify import Ending
from slurm_resilience.resume.decide.goodput import Goodput, SpentAttempt, add_up, in_words
from slurm_resilience.resume.history import AttemptHistory

NODE = Ending(137, 60.0, True, "RUNNING", {"n2": "dead"}, ended_at=160.0, nodes=("n1", "n2"))
SIGNAL = Ending(137, 30.0, False, "RUNNING", {}, ended_at=200.0)
WELL = Ending(0, 790.0, True, "RUNNING", {}, ended_at=1100.0)


def test_an_attempt_costs_what_is_done_again_and_the_way_to_the_next() -> None:
    spent = [
        SpentAttempt(100.0, 160.0, "hardware", 20.0),
        SpentAttempt(165.0, 200.0, "bug", 35.0, is_exact=False),
        SpentAttempt(210.0, 1100.0, "none", 40.0, stopped={"hardware": 5.0}),
    ]
    found = add_up(spent, ended_well=True)
    assert found == Goodput(1000.0, {"hardware": 30.0, "bug": 45.0}, is_exact=False)
    assert found.share == pytest.approx(0.925)
    assert in_words(found) == (
        "at least 92.5 % of 16 min 40 s",
        "at most 1 min 15 s: bug 45.0 s, hardware 30.0 s",
    )
    failed = add_up(spent, ended_well=False)
    assert failed.lost["none"] == 40.0, "what was done since the last report is gone too"


def test_the_history_knows_the_causes(capfd: pytest.CaptureFixture[str]) -> None:
    history = AttemptHistory(None, 7, 0, ("train.py",), 1)
    history.start(1, ("n1", "n2"), 100.0)
    assert history.goodput() is None, "nothing has ended"
    history.end(NODE, "n2: dead", 10, 20.0)
    assert history.goodput() is None, "nothing came after it"
    history.start(2, ("n1", "n3"), 165.0)
    history.end(SIGNAL, "task 0 ended with SIGKILL", 10, 35.0)
    history.start(3, ("n1", "n3"), 210.0)
    history.stood_still("hardware", 2.0)
    history.stood_still("hardware", 3.0)
    history.end(WELL, "the program ended well", 90, 40.0)
    found = history.goodput()
    assert found is not None
    assert found.lost == {"hardware": 30.0, "unknown": 45.0}
    report.summary(found, 3, 1)
    said = capfd.readouterr().err
    assert "the end: 3 attempts, 1 requeue" in said
    assert "goodput       at least 92.5 % of 16 min 40 s" in said
    assert "time lost     at most 1 min 15 s: unknown 45.0 s, hardware 30.0 s" in said


def test_a_program_without_a_fault_needs_no_summary() -> None:
    history = AttemptHistory(None, 7, 0, ("train.py",), 1)
    history.start(1, ("n1",), 310.0)
    history.end(WELL, "the program ended well", 90, 0.0)
    assert history.goodput() is None


def test_one_attempt_that_lived_on_has_one() -> None:
    history = AttemptHistory(None, 7, 0, ("train.py",), 1)
    history.start(1, ("n1",), 310.0)
    history.stood_still("hardware", 5.0)
    history.end(WELL, "the program ended well", 90, 0.0)
    found = history.goodput()
    assert found is not None and found.is_exact
    assert in_words(found) == ("99.3 % of 13 min 10 s", "5.0 s: hardware 5.0 s")


seconds = st.floats(0, 1e6)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=6), st.booleans())
def test_the_share_is_a_share(times: list[tuple[float, float, float]], ended_well: bool) -> None:
    now, spent = 0.0, []
    for ran, pause, again in times:
        spent.append(SpentAttempt(now, now + ran, "bug", min(ran, again)))
        now += ran + pause
    found = add_up(spent, ended_well=ended_well)
    assert 0.0 <= found.share <= 1.0
    assert sum(found.lost.values()) <= found.seconds * 1.000001 + 1e-6
