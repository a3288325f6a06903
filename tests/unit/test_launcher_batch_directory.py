"""The place of cached batches, its owners, and its removal: nothing stays for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import batch_directory


def a_place(root: Path, name: str) -> Path:
    leaf = root / f"sres-data-{os.geteuid()}-{name}" / f"{batch_directory.PREFIX}x-seat-0"
    batch_directory.hold(leaf).release()
    (leaf / "000000000000.0-4").write_text("a batch")
    return leaf


@pytest.mark.parametrize(
    ("env", "end"),
    [
        ({"SLURM_JOB_ID": "12", "SRES_DIR": "/x"}, "j12"),
        ({"SLURM_JOB_ID": "../9"}, "j___9"),
        ({}, f"p{os.getppid()}"),
    ],
)
def test_names(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], end: str) -> None:
    for name in ("SLURM_JOB_ID", "SRES_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert batch_directory.default_root().name == f"sres-data-{os.geteuid()}-{end}"


def test_only_ones_own_directory_is_trusted(tmp_path: Path) -> None:
    made = batch_directory.private(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(UsageError, match="mode 777"):
        batch_directory.private(open_to_all)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(UsageError, match="not a directory"):
        batch_directory.private(tmp_path / "link")
    with pytest.raises(UsageError, match="could have been written by others"):
        batch_directory.hold(open_to_all / "leaf")


def test_a_place_is_stale_when_nobody_lives_there(tmp_path: Path) -> None:
    leaf = a_place(tmp_path, "j1")
    held = batch_directory.hold(leaf)
    assert batch_directory.stale(tmp_path, idle=0) == []
    held.release()
    assert batch_directory.stale(tmp_path, idle=900) == [], "its owner may come back"
    launcher = batch_directory.hold(leaf.parent)
    assert batch_directory.stale(tmp_path, idle=0) == [], "its launcher lives"
    launcher.release()
    assert batch_directory.stale(tmp_path, idle=0) == [leaf.parent]
    assert list(tmp_path.iterdir()) == []


def test_a_place_without_a_parent_is_stale_at_once(tmp_path: Path) -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    gone = a_place(tmp_path, f"p{pid}")
    here = a_place(tmp_path, f"p{os.getpid()}")
    (tmp_path / f"sres-data-{os.geteuid()}-j5").write_text("not a place")
    (tmp_path / f"sres-{os.geteuid()}-7").mkdir()
    assert batch_directory.stale(tmp_path) == [gone.parent]
    assert here.exists()


def test_the_last_one_out_removes_it(tmp_path: Path) -> None:
    leaf = tmp_path / "c" / f"{batch_directory.PREFIX}x"
    one, two = batch_directory.hold(leaf), batch_directory.hold(leaf)
    one.release()
    assert not batch_directory.remove(leaf)
    two.release()
    assert batch_directory.remove(leaf)
    assert batch_directory.remove(leaf), "gone already"
    assert list(tmp_path.iterdir()) == []
    batch_directory.hold(leaf).release()
    assert leaf.is_dir(), "made anew"


def test_clean_takes_only_what_is_ours(tmp_path: Path) -> None:
    batch_directory.hold(tmp_path / f"{batch_directory.PREFIX}x").release()
    (tmp_path / "thesis.tex").write_text("years of work")
    batch_directory.clean(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    batch_directory.clean(tmp_path / "never-was")


def test_a_fork_does_not_keep_a_lock(tmp_path: Path) -> None:
    """The children of a data loader live a little longer than a process that was killed."""
    held = batch_directory.hold(tmp_path / "leaf")
    out, into = os.pipe()
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(into)
        os.write(say, b"x")
        os.read(out, 1)
        os._exit(0)
    os.read(said, 1)
    assert batch_directory.lock(tmp_path / "leaf" / batch_directory.LOCK) is None
    held.release()
    alone = batch_directory.lock(tmp_path / "leaf" / batch_directory.LOCK)
    os.close(into)
    os.waitpid(child, 0)
    for fd in (out, said, say):
        os.close(fd)
    assert alone is not None
    alone.release()
