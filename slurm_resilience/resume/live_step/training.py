"""Hear what the training itself tells: that it can re-form its world, how it goes, how it ended.

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

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.mesh.rendezvous import TrainingOutcome
from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.fence import Fence
from slurm_resilience.resume.live_step.living_program import (
    CHECKPOINTLESS,
    LAUNCHER,
    can_live,
    uses_training_library,
)
from slurm_resilience.resume.live_step.seats import SeatMap, seat_map
from slurm_resilience.resume.srun.step import SrunStep, find_step
from slurm_resilience.wire.frames import UNREADABLE

NEWS_SECONDS = 1.0
"""Longest wait of the thread that hands news on, until it looks whether it has to end."""
_RENDEZVOUS = ("mesh", "mesh.*", "run/*/mesh")
"""Below the directory: where the ranks meet by themselves, and through their launchers."""


def find_rendezvous(directory: str) -> Path | None:
    """Return where the training of this attempt meets; None: it has not announced itself yet."""
    if not directory:
        return None
    for pattern in _RENDEZVOUS:
        for path in sorted(Path(directory).glob(pattern)):
            with contextlib.suppress(OSError):
                if any((path / "peers").iterdir()):
                    return path
    return None


def read_outcome(rendezvous: Path) -> TrainingOutcome | None:
    """Return how the training ended; None: it goes on."""
    try:
        return msgspec.json.decode((rendezvous / "outcome").read_bytes(), type=TrainingOutcome)
    except (OSError, *UNREADABLE):
        return None


def forget(directory: str) -> None:
    """Remove what an earlier attempt wrote: it does not hold for the next one."""
    if directory:
        for name in ("mesh*", "run", "left"):
            for path in Path(directory).glob(name):
                shutil.rmtree(path, ignore_errors=True)


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


class TrainingWatch:
    """The trainings of all attempts, as they announce themselves."""

    def __init__(self, context: SupervisorContext, fence: Fence) -> None:
        self._context = context
        self._fence = fence
        self._advised = False
        self.lives = bool(fence.directory) and can_live(context.command, context.environment)
        """Steps are started so that they outlive a node."""

    def connect(self, stack: contextlib.ExitStack) -> tuple[Path, Observer] | None:
        """Return where the training meets, and its observer; None: it has not announced itself.

        Args:
            stack: ends the watching.
        """
        rendezvous = find_rendezvous(self._fence.directory)
        if rendezvous is None:
            return None
        try:
            observer = stack.enter_context(observe(rendezvous, self._context.wake.set))
        except (SresError, OSError) as error:
            report.say(f"the training cannot be watched ({error}): it is stopped when a node dies")
            self.lives = False
            return None
        self._context.wake.set()
        return rendezvous, observer

    def seat_map(
        self, step: SrunStep, nodes: tuple[str, ...], observer: Observer
    ) -> SeatMap | None:
        """Return the node of every seat; None: not all seats have been seen yet.

        Args:
            step: the attempt's.
            nodes: those that it was started on.
            observer: of the running training.
        """
        picture = observer.picture()
        node_of_seat = {peer.seat: peer.node for peer in picture.peers}
        seats = max((peer.seats for peer in picture.peers), default=0)
        all_nodes = set(nodes) <= set(node_of_seat.values())
        if not picture.running or not all_nodes or len(node_of_seat) < seats:
            return None
        context = self._context
        info = find_step(step, context.client, context.allocation.id, context.host)
        return seat_map(nodes, node_of_seat, info.tasks if info else 0, seats)

    def advise(self) -> None:
        """Say once that the program could live on, but its step was not started so."""
        if self.lives or self._advised or find_rendezvous(self._fence.directory) is None:
            return
        self._advised = True
        context = self._context
        if context.environment.get(CHECKPOINTLESS) != "0" and not uses_training_library(
            context.command, context.environment
        ):
            report.say(
                "this program can go on when a node dies, but its step was not started so: write "
                f"export {CHECKPOINTLESS}=1 before srun, or start it by {LAUNCHER}"
            )
