"""The shared directory of a supervised step: fence, token, progress."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from slurm_resilience.resume import attempt, fence


@pytest.fixture(autouse=True)
def _no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SRES_TOKEN", "SRES_DIR", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def as_task(monkeypatch: pytest.MonkeyPatch, directory: str, token: str) -> None:
    monkeypatch.setenv("SRES_DIR", directory)
    monkeypatch.setenv("SRES_TOKEN", token)


def test_without_a_supervisor_everything_is_allowed(tmp_path: Path) -> None:
    assert attempt.is_current()
    attempt.report(5)
    assert attempt.read_progress(str(tmp_path)) == -1


def test_only_the_last_attempt_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    fence.raise_fence(directory, "12.0.1")
    as_task(monkeypatch, directory, "12.0.1")
    assert attempt.is_current()
    fence.raise_fence(directory, "12.0.2")
    assert not attempt.is_current()
    fence.remove(directory)
    assert not attempt.is_current()
    assert list(tmp_path.iterdir()) == []


def test_a_fence_that_was_removed_is_raised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    assert fence.raise_fence(directory, "12.0.1") == ""
    assert fence.holds(directory, "12.0.1")
    shutil.rmtree(tmp_path / fence.FOLDER)
    as_task(monkeypatch, directory, "12.0.1")
    attempt.report(5)  # has no listener, and does not fail
    assert not fence.holds(directory, "12.0.1")
    assert fence.raise_fence(directory, "12.0.2") == ""
    assert fence.holds(directory, "12.0.2")
    assert not attempt.is_current()


def test_a_fence_that_cannot_be_raised_is_told_and_leaves_no_old_one(tmp_path: Path) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    fence.raise_fence(directory, "12.0.1")
    (Path(directory) / "token.new").mkdir()  # as good as a full disk: it cannot be written
    assert "token.new" in fence.raise_fence(directory, "12.0.2")
    assert not (Path(directory) / attempt.FENCE).exists()
    shutil.rmtree(tmp_path / fence.FOLDER)
    (tmp_path / fence.FOLDER).symlink_to(tmp_path)
    assert "not ours" in fence.raise_fence(directory, "12.0.2")


def test_progress_is_the_last_word_whoever_said_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    as_task(monkeypatch, directory, "12.0.1")
    for step in (1, 20, 300):
        attempt.report(step, loss=0.5)
    assert attempt.read_progress(directory) == 300


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "x"}', '{"step": null}', "7", "\xff"])
def test_nonsense_is_no_progress(tmp_path: Path, text: str) -> None:
    (tmp_path / attempt.PROGRESS).write_bytes(text.encode("latin-1"))
    assert attempt.read_progress(str(tmp_path)) == -1


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / fence.FOLDER).symlink_to(elsewhere)
    assert fence.open_directory(tmp_path, 12, 99) == ""
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a folder of another user")
def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    parent = tmp_path / fence.FOLDER
    parent.mkdir()
    os.chown(parent, 65534, 65534)
    assert fence.open_directory(tmp_path, 12, 99) == ""


def test_a_directory_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert fence.open_directory(tmp_path / "file", 12, 99) == ""


def test_an_earlier_life_is_revoked_and_a_sibling_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, sibling, own = (fence.open_directory(tmp_path, 12, pid) for pid in (1, 2, 3))
    other = fence.open_directory(tmp_path, 120, 1)
    fence.raise_fence(old, "12.0.4")
    fence.raise_fence(sibling, "12.1.1")
    fence.raise_fence(other, "120.0.1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    fence.revoke_older(tmp_path, 12, own)
    assert not Path(old).exists()
    assert all(Path(path).exists() for path in (sibling, other, own))
    as_task(monkeypatch, old, "12.0.4")
    assert not attempt.is_current()
