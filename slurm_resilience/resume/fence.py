"""The shared directory of one supervised step: its fence token and its reported progress."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from slurm_resilience.resume import attempt

FOLDER = ".sres"


def open_directory(base: Path, job: int, supervisor: int) -> str:
    """A directory that every node of the job sees; empty when there is none to be had.

    Args:
        base: the directory srun was started in (a shared file system on any cluster that trains).
        job: job id.
        supervisor: our pid: two supervised sruns of one job have a directory each.
    """
    directory = base / FOLDER / f"job-{job}-{supervisor}"
    try:
        _make(directory)
    except OSError:
        return ""
    return str(directory)


def _make(directory: Path) -> None:
    parent = directory.parent
    parent.mkdir(mode=0o700, exist_ok=True)
    # Somebody else's folder, or a link to elsewhere, is not ours to write into.
    info = parent.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise PermissionError(f"{parent} is not ours")
    directory.mkdir(mode=0o700, exist_ok=True)


def revoke_older(base: Path, job: int, own: str) -> None:
    """Make the attempts of earlier lives of this job (before a requeue) stale.

    Only directories whose token names an earlier restart: a second supervised srun of the same
    life goes on.
    """
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    with contextlib.suppress(OSError):
        for directory in (base / FOLDER).glob(f"job-{job}-*"):
            token = _read(directory / attempt.FENCE).split(".")
            earlier = len(token) == 3 and token[1] != restarts
            if str(directory) != own and earlier:
                shutil.rmtree(directory, ignore_errors=True)


def raise_fence(directory: str, token: str) -> str:
    """From now on only this attempt may write.

    Somebody may have removed the directory (``git clean``, ``rm -rf .sres``), or a quota may be
    used up: no reason to lose the job.

    Returns:
        What is wrong, when the fence could not be raised; the one before it is gone then.
    """
    if not directory:
        return ""
    path = Path(directory) / attempt.FENCE
    new = path.with_suffix(".new")
    try:
        _make(path.parent)
        new.write_text(token + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        for old in (new, path):
            with contextlib.suppress(OSError):
                old.unlink()
        return str(error)
    return ""


def leave(directory: str, node: str, step: int) -> None:
    """Nobody on this node may write any more, but for steps from this one on.

    Args:
        node: it was left, and may only be cut off.
        step: number of the attempt's next step.
    """
    if directory:
        path = Path(directory) / attempt.LEFT / node
        # Without it, the node's own sresd and the others' refusal remain.
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            new = path.with_name(f".{node}.new")
            new.write_text(f"{step}\n", encoding="utf-8")
            new.replace(path)


def holds(directory: str, token: str) -> bool:
    """Is the fence of this attempt where its programs look for it? True also where there is none to
    be had, and where it cannot be seen just now."""
    if not directory:
        return True
    try:
        return (Path(directory) / attempt.FENCE).read_text(encoding="utf-8").strip() == token
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def remove(directory: str) -> None:
    """The step is over: nobody of it may write, nothing of ours stays."""
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(directory).parent.rmdir()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
