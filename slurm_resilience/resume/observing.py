"""Watch a training from outside, and have its news handed on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_resilience.mesh.observer import Observer

NEWS_SECONDS = 1.0
"""Longest wait of the thread that hands news on, until it looks whether it has to end."""


@contextlib.contextmanager
def observe(rendezvous: Path, on_news: Callable[[], None]) -> Iterator[Observer]:
    """Watch the training.

    Args:
        rendezvous: what `find_rendezvous` returned.
        on_news: called (in a thread) at every change.

    Raises:
        UsageError: the rendezvous cannot be used.
    """
    with Observer(f"dir:{rendezvous}") as observer:
        over = threading.Event()

        def hand_on() -> None:
            while not over.is_set():
                if observer.news.wait(NEWS_SECONDS):
                    observer.news.clear()
                    on_news()

        thread = threading.Thread(target=hand_on, name="training", daemon=True)
        thread.start()
        try:
            yield observer
        finally:
            over.set()
            observer.news.set()
            thread.join(timeout=2 * NEWS_SECONDS)
