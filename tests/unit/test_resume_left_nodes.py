"""A node that a living step has left may not write; the one that came in its place may."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.resume import attempt, fence


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


def test_no_directory_is_no_reason_to_fail() -> None:
    fence.exclude_node("", "n3", 1)
    fence.exclude_node("/proc/nowhere", "n3", 1)
