"""Each attempt gets the same standard input from its beginning."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.standard_input import (
    InputKind,
    StandardInput,
    kind_of,
    reads_input,
)

TEXT = b"one\ntwo\n" + b"x" * 300_000 + b"\nlast\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def read_by(given: StandardInput, *program: str) -> bytes:
    """Run a program as the next attempt; return its output."""
    with given.attempt() as stdin:
        process = subprocess.Popen(program or ("cat",), stdin=stdin, stdout=subprocess.PIPE)
    answer, _ = process.communicate(timeout=30)
    return answer


def write_all(sink: int, text: bytes) -> threading.Thread:
    def run() -> None:
        view = memoryview(text)
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(sink, view) :]
        os.close(sink)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_pipe_is_read_again_from_its_beginning(pipe: tuple[int, int]) -> None:
    write_all(pipe[1], TEXT)
    given = StandardInput(1 << 20, is_read=True, source=pipe[0])
    assert [read_by(given) for _ in range(3)] == [TEXT] * 3
    assert given.lost == ""


def test_an_attempt_that_read_a_part_hides_nothing_from_the_next(pipe: tuple[int, int]) -> None:
    writer = write_all(pipe[1], TEXT)
    given = StandardInput(1 << 20, is_read=True, source=pipe[0])
    assert read_by(given, "head", "-c", "4") == b"one\n"
    assert read_by(given, "true") == b""
    assert read_by(given) == TEXT
    writer.join(30)


def test_what_is_written_while_the_second_attempt_reads(pipe: tuple[int, int]) -> None:
    given = StandardInput(1 << 20, is_read=True, source=pipe[0])
    os.write(pipe[1], b"early ")
    assert read_by(given, "head", "-c", "6") == b"early "
    with given.attempt() as stdin:
        process = subprocess.Popen(["cat"], stdin=stdin, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"early "
    os.write(pipe[1], b"late")
    os.close(pipe[1])
    assert process.communicate(timeout=30)[0] == b"late"


def test_past_the_limit_it_passes_once_and_says_so_once(
    pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    write_all(pipe[1], TEXT)
    given = StandardInput(1000, is_read=True, source=pipe[0])
    assert read_by(given) == TEXT
    assert "longer than 1000 bytes" in given.lost
    assert capfd.readouterr().err.count("cannot be started again") == 1


def test_it_is_not_read_ahead_of_the_program(pipe: tuple[int, int]) -> None:
    """A producer without end does not run into the limit while the program takes its time."""
    given = StandardInput(1 << 20, is_read=True, source=pipe[0])
    writer = write_all(pipe[1], b"y\n" * 10_000_000)
    assert read_by(given, "head", "-c", "2") == b"y\n"
    assert given.lost == ""
    given.close()
    os.close(pipe[0])
    writer.join(30)


def test_a_file_is_read_again_from_where_it_stood(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(TEXT)
    number = os.open(path, os.O_RDONLY)
    os.lseek(number, 4, os.SEEK_SET)
    given = StandardInput(0, is_read=True, source=number)
    for _ in range(2):
        with given.attempt() as stdin:
            assert stdin is None
        assert os.read(number, 4) == b"two\n"
    os.close(number)


def test_kinds(pipe: tuple[int, int], tmp_path: Path) -> None:
    assert kind_of(pipe[0]) is InputKind.PIPE
    with Path("/dev/null").open() as null, (tmp_path / "file").open("w") as file:
        assert (kind_of(null.fileno()), kind_of(file.fileno())) == (
            InputKind.INHERITED,
            InputKind.FILE,
        )
    assert kind_of(987) is InputKind.INHERITED
    given = StandardInput(9, is_read=False, source=pipe[0])
    with given.attempt() as stdin:
        assert stdin is None


@pytest.mark.parametrize(
    ("words", "mode", "expected"),
    [
        ([], "", True),
        (["--input=all"], "none", True),
        (["-i0"], "", True),
        (["-i", "none"], "", False),
        (["--input=my.txt"], "", False),
        ([], "none", False),
        (["--pty"], "", False),
    ],
)
def test_srun_reads_it(words: list[str], mode: str, expected: bool) -> None:
    assert reads_input(split([*words, "train"], BUILTIN), mode) is expected


def test_where_nothing_can_be_kept_the_attempt_reads_all_the_same(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All disks are full: this attempt gets its whole input, and no other one a part of it."""
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null/no"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    write_all(pipe[1], TEXT)
    given = StandardInput(1 << 20, is_read=True, source=pipe[0])
    assert read_by(given) == TEXT
    assert "could not be kept in any directory" in given.lost
