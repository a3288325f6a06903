"""Tell a program under `srun --auto-resume=1` whether it may still write; take its progress.

Needs nothing but Python's own library, so that any training script can import it::

    from slurm_resilience.resume import attempt

    if attempt.is_current():        # a node that was cut off must not write any more
        os.replace(temporary, checkpoint)
        attempt.report(step)        # shown in the job's log after a failure; counts as progress

    attempt.step(step)              # after each step: where none comes any more, the job hangs
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from slurm_resilience.resume.progress import step_sender

FENCE = "token"
LEFT = "left"
"""Directory with a file for each node that a living step has left: the number of the attempt's
first step that counts there again."""
PROGRESS = "progress"
MAX_PROGRESS_BYTES = 1 << 20
MAX_TOKEN_BYTES = 1000
MAX_STEP = 2**63 - 1


def token() -> str:
    """Return this process's attempt, e.g. ``12.0.2`` (job, restarts, attempt).

    Empty where nothing supervises: also in a job that was submitted by a task of another one, whose
    variables it may have got.
    """
    own_token = os.environ.get("SRES_TOKEN", "")
    job = os.environ.get("SLURM_JOB_ID", "")
    return own_token if not job or own_token.startswith(f"{job}.") else ""


def is_current() -> bool:
    """Return whether this attempt is still the one that may write.

    True as well where nothing supervises (plain srun). False when a later attempt has begun; when
    the shared directory cannot be read, since the fence cannot be seen then; and on a node that the
    others have left.
    """
    own_token, directory = token(), os.environ.get("SRES_DIR", "")
    if not own_token or not directory:
        return True
    try:
        current = read_token(Path(directory) / FENCE) == own_token
        return current and not _left_behind(Path(directory))
    except (OSError, ValueError):
        return False


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the first bytes of a file in a folder that others may reach.

    Raises:
        OSError: it cannot be read; or it is a link or a pipe, which is neither followed nor waited
            for, or a directory.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Before it becomes a file object: a directory never does.
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.ELOOP, "not a regular file", str(path))
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(number)


def write_file(path: Path, data: bytes) -> None:
    """Write a file in a folder that others may reach (``chmod -R 777`` of a project), in place of
    whatever has its name: a link is not followed, and a pipe is not waited for.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        number = os.open(path, flags, 0o666)
    except FileExistsError:
        path.unlink()
        number = os.open(path, flags, 0o666)
    with os.fdopen(number, "wb") as file:
        file.write(data)


def read_token(path: Path) -> str:
    """Return the word in a file; what is no text is no word of ours either.

    Raises:
        OSError: as `read_file`.
    """
    return read_file(path, MAX_TOKEN_BYTES).decode("utf-8", "replace").strip()


def _left_behind(directory: Path) -> bool:
    node = os.environ.get("SRES_NODE") or os.environ.get("SLURMD_NODENAME", "")
    try:
        first = int(read_token(directory / LEFT / node)) if node else 0
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return int(os.environ.get("SRES_STEP") or "0") < first


def report(step: int, **details: object) -> None:
    """Tell the supervisor the last step from which training could go on (a checkpoint).

    A full disk or a directory that is gone does not end a training: the step is not told then.

    Args:
        step: optimizer steps completed: a whole number.
        details: e.g. ``loss``; what JSON does not know (a tensor) is written as text.
    """
    directory = os.environ.get("SRES_DIR", "")
    if not directory or (os.environ.get("SRES_TOKEN") and not token()):
        return
    own = Path(directory) / f"{PROGRESS}.{os.getpid()}"
    import json  # late, as below

    text = json.dumps({"step": int(step), "token": token()} | details, default=str)
    with contextlib.suppress(OSError):
        write_file(own, text.encode())
        own.replace(Path(directory) / PROGRESS)


def step(number: int, own_seconds: float = 0.0, rank: int | None = None) -> None:
    """Tell the supervisor that a step is done: where no more come, it names the rank at fault and
    starts the program again. `slurm_resilience.training` does it by itself.

    It costs next to nothing: call it after each optimizer step, on each rank. It is no checkpoint:
    that is `report`.

    Args:
        number: of the step.
        own_seconds: for which this rank itself worked on it, without waiting for others (all that
            comes before the collective). From it slow nodes are named. 0: not known.
        rank: of this process; None: `$RANK`, else `$SLURM_PROCID`.
    """
    if token():
        step_sender.note(str(int(number)), float(own_seconds), rank)


def pause(rank: int | None = None) -> None:
    """Tell the supervisor that what follows may take as long as it likes (an evaluation, an
    export, the end): until this rank's next step the program does not count as hung.

    Args:
        rank: of this process; None: `$RANK`, else `$SLURM_PROCID`.
    """
    if token():
        step_sender.note(step_sender.PAUSE, rank=rank)


def reported_at(directory: str) -> float:
    """Return when the last step was reported, seconds since the epoch; 0: none was."""
    try:
        return (Path(directory) / PROGRESS).stat().st_mtime if directory else 0.0
    except OSError:
        return 0.0


def read_progress(directory: str) -> int:
    """Return the last reported step; -1 when there is none, or none that can be understood."""
    try:
        text = read_file(Path(directory) / PROGRESS, MAX_PROGRESS_BYTES)
        import json  # late: most steps have told nothing when this is first asked

        step = int(json.loads(text)["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1  # the program writes it: there may be anything
    return step if 0 <= step <= MAX_STEP else -1
