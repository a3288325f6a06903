"""A node that a living step has left may not write; the one that came in its place may."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.resume import attempt, fence, report
from slurm_resilience.resume.srun.host_calls import HostCalls


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = fence.open_directory(tmp_path, 12, 34)
    assert not fence.raise_fence(path, "12.0.1")
    for name, value in {"SRES_DIR": path, "SRES_TOKEN": "12.0.1", "SLURMD_NODENAME": "n3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SRES_NODE", raising=False)
    return path


@pytest.mark.parametrize(
    ("step", "current"), [("0", False), ("1", False), ("2", True), ("7", True)]
)
def test_steps_before_the_loss_are_stale(
    directory: str, monkeypatch: pytest.MonkeyPatch, step: str, current: bool
) -> None:
    monkeypatch.setenv("SRES_STEP", step)
    assert attempt.is_current()
    fence.exclude_node(directory, "n3", 2)
    assert attempt.is_current() is current


def test_other_nodes_go_on(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_STEP", "0")
    fence.exclude_node(directory, "n4", 1)
    assert attempt.is_current()
    monkeypatch.setenv("SRES_NODE", "n4")
    assert not attempt.is_current()


def test_who_cannot_read_it_must_not_write(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_STEP", "1")
    fence.exclude_node(directory, "n3", 1)
    assert attempt.is_current()
    (Path(directory) / attempt.LEFT / "n3").write_text("")
    assert not attempt.is_current()


def test_no_directory_is_no_reason_to_fail(capfd: pytest.CaptureFixture[str]) -> None:
    for directory in ("", "/proc/nowhere"):
        left = fence.LeftNodes(directory, HostCalls())
        left.add("n3", 1)
        left.write()
    said = capfd.readouterr().err
    assert said.count("n3 cannot be forbidden to write (No such file or directory)") == 1


@pytest.mark.parametrize("hangs", ["exclude_node", "_stands"])
def test_a_file_system_that_hangs_in_the_middle_of_a_step_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """The log had no line while the supervisor hung there, and nothing was mended."""
    slurm, told, lines = FakeSlurm(2), threading.Event(), list[str]()
    monkeypatch.chdir(tmp_path)
    own = fence.Fence(slurm, slurm.job(slurm.submit(2)), 0, HostCalls())
    left = fence.LeftNodes(own.directory, HostCalls())

    def take(line: str) -> None:
        lines.append(line)
        told.set()

    def answer(*_: object) -> bool:
        return told.wait(30)

    monkeypatch.setattr(fence, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(fence, hangs, answer)
    with report.written_to(take):
        if hangs == "_stands":
            own.mend()
        else:
            left.add("n2", 1)
    assert [f"the file system of {own.directory} has not answered" in line for line in lines] == [
        True
    ]


def test_what_a_full_disk_keeps_out_is_written_when_there_is_room(
    directory: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SRES_STEP", "0")
    write_file, is_full = attempt.write_file, True

    def write(path: Path, data: bytes) -> None:
        write_file(path, b"" if is_full else data)
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(attempt, "write_file", write)
    left = fence.LeftNodes(directory, HostCalls())
    left.add("n3", 2)
    left.add("n4", 1)
    left.add("n3", 3)  # it came in again meanwhile, and was lost again
    left.write()
    assert attempt.is_current(), "nothing could be told"
    is_full = False
    left.write()
    assert not attempt.is_current()
    monkeypatch.setenv("SRES_STEP", "2")
    assert not attempt.is_current()
    monkeypatch.setenv("SRES_STEP", "3")
    assert attempt.is_current()
    left.write()
    said = capfd.readouterr().err
    assert said.count("cannot be forbidden to write (No space left on device)") == 3
    assert [said.count(f"{node} is forbidden to write now") for node in ("n3", "n4")] == [1, 1]
