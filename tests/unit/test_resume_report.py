"""The job's log after seats were filled again."""

from __future__ import annotations

import errno
import io
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume import report
from slurm_resilience.resume.srun.host_calls import HostCalls


@pytest.mark.parametrize(
    ("step", "before", "said"),
    [
        (90, 84, "goes on at step 90, from memory"),
        (84, -1, "goes on at step 84, from memory"),
        (0, 84, "goes on at step 0; it had been at step 84"),
        (-1, 84, "goes on; it had been at step 84"),
        (-1, -1, "goes on"),
    ],
)
def test_where_it_goes_on(
    step: int, before: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    seats = report.HealedBlock("n2: dead", "n3 joined", (2, 3), None, 1.0, 2.0, 3.0, step, before)
    report.healed(seats)
    assert f"training      {said}\n" in capfd.readouterr().err


@given(
    words=st.lists(st.text("abc-[],;", min_size=1, max_size=30), min_size=1, max_size=40),
    width=st.integers(30, 300),
    start=st.sampled_from(("what failed   ", "how long      ", "09:03:58 ")),
)
def test_a_line_that_does_not_fit_the_terminal_is_set_in(
    words: list[str], width: int, start: str
) -> None:
    text = start + " ".join(words)
    lines = report.fold_line(text, width)
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    longest = max(map(len, words)) + len(start)
    assert all(len(line) <= max(width, longest) for line in lines)
    assert all(line.startswith(" " * len(start)) for line in lines[1:])
    assert lines[0].startswith(start.strip())


def test_a_log_has_room_for_any_line(capfd: pytest.CaptureFixture[str]) -> None:
    report.say("word " * 100)
    assert capfd.readouterr().err.count("\n") == 1
    assert report.fold_line("─" * 72, 60) == ["─" * 72]


def test_a_slow_reader_gets_all_where_another_process_made_the_pipe_non_blocking() -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    text = b"x" * 500_000

    def write() -> None:
        report.write_all(sink, memoryview(text))
        os.close(sink)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(0.1)
    read = b""
    while data := os.read(source, 65536):
        read += data
    assert read == text
    os.close(source)


def test_a_bug_of_ours_ends_no_step_whose_log_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    try:
        raise AssertionError("a bug")
    except AssertionError:
        HostCalls().show_bug()
