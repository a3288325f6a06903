"""Tell a program under `srun --auto-resume=1` whether it may still write; take its progress.

Needs nothing but Python's own library, so that any training script can import it::

    from slurm_resilience.resume import attempt

    if attempt.is_current():        # a node that was cut off must not write any more
        os.replace(temporary, checkpoint)
        attempt.report(step)        # shown in the job's log after a failure; counts as progress
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

FENCE = "token"
LEFT = "left"
"""Directory with a file for each node that a living step has left: the number of the attempt's
first step that counts there again."""
PROGRESS = "progress"
MAX_PROGRESS_BYTES = 1 << 20
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
        current = (Path(directory) / FENCE).read_text(encoding="utf-8").strip() == own_token
        return current and not _left_behind(Path(directory))
    except (OSError, ValueError):
        return False


def _left_behind(directory: Path) -> bool:
    node = os.environ.get("SRES_NODE") or os.environ.get("SLURMD_NODENAME", "")
    try:
        first = int((directory / LEFT / node).read_text(encoding="utf-8")) if node else 0
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
    text = json.dumps({"step": int(step), "token": token()} | details, default=str)
    with contextlib.suppress(OSError):
        own.write_text(text, encoding="utf-8")
        own.replace(Path(directory) / PROGRESS)


def reported_at(directory: str) -> float:
    """Return when the last step was reported, seconds since the epoch; 0: none was."""
    try:
        return (Path(directory) / PROGRESS).stat().st_mtime if directory else 0.0
    except OSError:
        return 0.0


def read_progress(directory: str) -> int:
    """Return the last reported step; -1 when there is none, or none that can be understood."""
    try:
        with (Path(directory) / PROGRESS).open("rb") as file:
            step = int(json.loads(file.read(MAX_PROGRESS_BYTES))["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1  # the program writes it: there may be anything
    return step if 0 <= step <= MAX_STEP else -1
