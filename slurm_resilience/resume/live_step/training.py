"""The training's own word: that it can re-form its world, how it goes, and how it ended.

A program that uses `slurm_resilience.training` meets in the shared directory ``$SRES_DIR``. Here is
all that the supervisor knows of it.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from slurm_resilience.mesh.messages import UNREADABLE
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.mesh.rendezvous import TrainingOutcome

_MEETINGS = ("mesh", "run/*/mesh")
"""Below the directory: where the ranks meet by themselves, and through their launchers."""


def meeting(directory: str) -> Path | None:
    """Where the training of this attempt meets; None while it has not announced itself."""
    if not directory:
        return None
    for pattern in _MEETINGS:
        for path in sorted(Path(directory).glob(pattern)):
            with contextlib.suppress(OSError):
                if any((path / "peers").iterdir()):
                    return path
    return None


def outcome(meet: Path) -> TrainingOutcome | None:
    """How it ended; None while it goes on."""
    try:
        return msgspec.json.decode((meet / "outcome").read_bytes(), type=TrainingOutcome)
    except (OSError, *UNREADABLE):
        return None


def forget(directory: str) -> None:
    """A new attempt begins: what an earlier one wrote does not speak for it."""
    if directory:
        for name in ("mesh", "run", "left"):
            shutil.rmtree(Path(directory) / name, ignore_errors=True)


@contextlib.contextmanager
def watch(meet: Path, on_news: Callable[[], None]) -> Iterator[Observer]:
    """Be told of every change.

    Args:
        meet: what `meeting` found.
        on_news: called in a thread.

    Raises:
        UsageError: the meeting place cannot be used.
    """
    with Observer(f"dir:{meet}") as seen:
        over = threading.Event()

        def hand_on() -> None:
            while not over.is_set():
                if seen.news.wait(1.0):
                    seen.news.clear()
                    on_news()

        thread = threading.Thread(target=hand_on, name="training", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            seen.news.set()
            thread.join(timeout=2.0)
