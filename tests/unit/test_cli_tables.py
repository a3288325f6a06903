"""Tables and times for people."""

from __future__ import annotations

import time

import msgspec
import pytest

from slurm_resilience.cli import tables
from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.main import call
from slurm_resilience.cli.node_read import _row
from slurm_resilience.cli.tables import (
    clock_time,
    count,
    duration,
    item,
    plain,
    seconds_since,
    table,
)
from slurm_resilience.cli.view import is_faulty, node_view, slurm_state
from slurm_resilience.errors import SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.wire.messages import Message, NodeAnswer, ResizeRequest, Status

COLUMNS = ("NODE", "STATE", "HEALTH", "SRESD", "REASON", "JOBS", "SINCE")


def nasty() -> list[list[str]]:
    flags = frozenset({"NOT_RESPONDING", "DRAIN", "COMPLETING"})
    node = Node(
        "ip-10-1-23-45",
        "ALLOCATED",
        flags,
        reason="waits for the vendor \x1b[31m since Monday, ticket 44512; [bold]leave it[/bold]",
        reason_by="administrator",
        reason_at="2026-11-20T10:00:00",
    )
    jobs = [Job(1234560 + n, 0, "RUNNING", nodes=(node.name,)) for n in range(9)]
    seen = {"verdict": "requested", "why": "", "sresd": "never seen", "incident": None}
    return [_row(node_view(node, jobs, {"nodes": {node.name: seen}}), time.time())]


def test_a_list_fits_80_columns_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = table(COLUMNS, nasty())
    assert max(len(line) for line in text.splitlines()) <= 80
    bare = "".join(text.split())
    for word in ("ip-10-1-23-45", "+COMPLETING", "requested", "never", "1234560+8", "44512"):
        assert word in bare


def test_a_long_node_name_is_never_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes would look the same. The terminal breaks such a line by itself."""
    monkeypatch.setenv("COLUMNS", "80")
    names = ["gpu-h100-rack12-chassis03-node0123", "gpu-h100-rack12-chassis03-node0124"]
    state = "ALLOCATED+DRAIN+NOT_RESPONDING"
    rows = [
        (name, state, "requested", "silent", "Action:Replace", "123,124", "2d") for name in names
    ]
    lines = table(COLUMNS, rows).splitlines()
    assert [name for name in names if any(line.startswith(f"{name} ") for line in lines)] == names
    assert "requested" in lines[1] and "123,124" in lines[1]


def test_an_item_stands_two_blanks_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert item("n7: found dead in 2s, because no beat for 1.9 s") == (
        "  n7: found dead in 2s, because no beat\n    for 1.9 s"
    )


def test_no_terminal_is_one_line_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = table(COLUMNS, nasty())
    assert len(text.splitlines()) == 2
    assert "ALLOCATED*+COMPLETING+DRAIN" in text


def test_other_peoples_text_does_nothing_to_the_terminal() -> None:
    assert plain("a\x1b[31m\x07b\nc\u202ed") == "a?[31m?b c?d"
    assert "[bold]" in table(("TEXT",), [["[bold]x[/bold]"]])


def test_a_line_of_progress_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A deep check tells the reason of each node that it skips, which anyone may have written."""
    tables.tell("n2: skipped: bob's\nhammer \x1b]0;title\x07")
    assert capsys.readouterr().err == "n2: skipped: bob's hammer ?]0;title?\n"


def test_durations_have_one_unit() -> None:
    assert [duration(s) for s in (-1, 0.4, 119, 120, 7199, 7200, 180000)] == [
        "0s", "0s", "119s", "2m", "120m", "2h", "2d",
    ]  # fmt: skip


def test_times() -> None:
    now = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
    assert clock_time(now - 0.75, now) == "11:59:59.2"
    assert clock_time(now - 86400, now).startswith("2026-11-19 ")
    assert seconds_since("2026-11-20T11:59:00", now) == 60.0
    assert seconds_since("Unknown", now) is None


def test_counts() -> None:
    assert (count(1, "job"), count(0, "job"), count(2, "job")) == ("1 job", "0 jobs", "2 jobs")


def test_states_are_slurms_words() -> None:
    assert slurm_state(Node("n", "DOWN", frozenset({"NOT_RESPONDING", "FAIL"}))) == "DOWN*+FAIL"
    assert slurm_state(Node("n", "IDLE")) == "IDLE"


@pytest.mark.parametrize(
    ("node", "health", "faulty"),
    [
        (Node("n", "IDLE"), "healthy", False),
        (Node("n", "IDLE"), "unknown", False),
        (Node("n", "IDLE"), "sick", True),
        (Node("n", "IDLE", frozenset({"DRAIN"})), "healthy", True),
        (Node("n", "IDLE", frozenset({"NOT_RESPONDING"})), "unknown", True),
    ],
)
def test_faulty_is_what_either_says(node: Node, health: str, faulty: bool) -> None:
    view = node_view(node, (), {"nodes": {"n": {"verdict": health}}})
    assert is_faulty(view) is faulty


def test_a_slurmd_that_does_not_answer_is_no_unknown_health() -> None:
    silent = Node("n", "ALLOCATED", frozenset({"NOT_RESPONDING"}))

    def health(node: Node, verdict: str) -> str:
        return str(node_view(node, (), {"nodes": {"n": {"verdict": verdict}}})["health"])

    assert health(silent, "unknown") == "slurmd silent"
    assert health(silent, "dead") == "dead"
    assert health(Node("n", "IDLE"), "unknown") == "unknown"


def test_text_without_room_stands_under_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(tables, "_width", lambda: 50)
    rows = [("1", "x" * 35, "no beat for 4.2 s, and no probe was answered"), ("2", "y", "sick")]
    shown = table(("ID", "MACHINE", "REASON"), rows).splitlines()
    assert shown[0].split() == ["ID", "MACHINE"]
    assert shown[1].startswith("1") and shown[2].startswith("    no beat for 4.2 s")
    assert shown[-1] == "    sick" and max(map(len, shown)) <= 50
    assert len(table(("ID", "REASON"), [("1", "short")]).splitlines()) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (NodeAnswer(1, refused="no\x1b[2J\nmore"), r"not resized: no\?\[2J more"),
        (NodeAnswer(1, msgspec.Raw(b"\xc0")), "no answer of a supervisor"),
        (Status({}), "sresctld answered a Status"),
    ],
)
def test_what_a_users_program_answers_to_a_resize_harms_no_terminal(
    answer: Message, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wire:
        def __enter__(self) -> Wire:
            return self

        def __exit__(self, *_: object) -> None:
            """It has nothing to close."""

        def ask(self, asked: Message, _: float) -> Message:
            assert asked == ResizeRequest(7, 3)
            return answer

    monkeypatch.setattr(ClusterView, "connect", lambda _: Wire())
    with pytest.raises(SresError, match=why):
        ClusterView().resize(7, 3)


@pytest.mark.parametrize("words", [("1_2", "3"), ("\u0663", "3"), ("12", "1_0"), ("+7", "3")])
def test_a_resize_takes_no_other_number_than_the_one_that_was_written(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python reads 1_2 as 12: job 12 is another one than the element 2 of the array 1."""
    monkeypatch.setattr(ClusterView, "resize", lambda *_: pytest.fail("it is asked for"))
    assert call(["job", "resize", *words]) == 2
    said = capsys.readouterr().err
    assert "is no whole number in digits" in said or "1_2 is in an array" in said
