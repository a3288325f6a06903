"""Save once more where a whole training is asked to end.

Slurm sends SIGTERM to all processes of a job that is preempted, cancelled or at its time limit, and
SIGKILL later, after KillWait (30 s by default) or a GraceTime. Until then a step can be finished,
and a checkpoint of it be written::

    SIGTERM ─► this rank was asked: a key of the world ─► all were ─► the last step is planned
            ─► that step ─► checkpoint, by all ranks ─► each ends, by SIGTERM

Where one rank alone gets the signal, something else ends that rank, and the others go on.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import View
from slurm_resilience.training.leaving import term_signal
from slurm_resilience.training.leaving.term_signal import TermSignal

log = logging.getLogger("sres.training")

ASKED = "sres/asked/"
"""Before the number of a seat: a key that says that its rank was asked to end."""
ASKED_TO_END = "all ranks were asked to end"
"""The reason of a world's planned end that makes it the training's."""
ALL_ASKED_SECONDS = 5.0
"""Slurm's SIGTERM comes to all nodes within so long."""
STEP_SECONDS = 60.0
"""A step that is not over by then may hang. KillWait is 30 s by default."""
BETWEEN_SECONDS = 3.0
"""Without a next world for so long, ranks are missing, or are ended because one has failed."""
LOOK_SECONDS = 0.05


class LastSave:
    """The request to end, if there was one.

    Args:
        core: ranks that are asked together, by their seats: those of an elastic job's own nodes; 0:
            all are.
        save: writes a checkpoint, with all ranks of the world.
    """

    def __init__(self, core: int = 0, save: Callable[[], None] = lambda: None) -> None:
        self._core = core
        self._save = save
        self._begun = threading.Event()
        """Set when the last checkpoint is under way: what was asked for comes."""
        self._is_over = False
        self._signal: TermSignal | None = None
        self.is_asked = False

    def on_term(
        self, world: Callable[[], tuple[Mesh, View | None] | None], plan: Callable[[str], None]
    ) -> None:
        """Take SIGTERM as the request, from now on, unless the program has a handler of its own.

        Args:
            world: the mesh and the present world, None between two; None: there is no state yet.
            plan: has the present world end after the step that is under way, for a reason.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def asked() -> None:
            if self.is_asked:  # Slurm's own signal, and the one that the launcher passes on
                return
            self.is_asked = True
            comes = False
            try:
                comes = not self._is_over and self._comes_to_save(world, plan)
            except Exception:
                log.exception("no last checkpoint is written")
            if not comes:  # after an error, too: no process stays deaf to SIGTERM
                term_signal.end()

        self._signal = TermSignal()
        self._signal.listen(asked)

    def _comes_to_save(
        self, world: Callable[[], tuple[Mesh, View | None] | None], plan: Callable[[str], None]
    ) -> bool:
        """Plan the training's end, in each new world again, until the last checkpoint is begun.
        Tell whether it is: not where another rank was not asked, or no step is finished."""
        last = SYSTEM_CLOCK.monotonic() + STEP_SECONDS
        told, alone_at, planned = 0, 0.0, 0
        seen = SYSTEM_CLOCK.monotonic()
        while not self._begun.wait(LOOK_SECONDS):
            now, found = SYSTEM_CLOCK.monotonic(), world()
            if found is None or now > min(last, seen + BETWEEN_SECONDS):
                return False
            mesh, view = found
            if view is None:
                continue
            seen = now
            if view.generation != told:
                told, alone_at = view.generation, now + ALL_ASKED_SECONDS
                mesh.put(view.generation, f"{ASKED}{mesh.me.seat}", b"1")
            seats = [member.peer.seat for member in view.members]
            together = [seat for seat in seats if seat < self._core or not self._core]
            if silent := _silent(mesh, view, together):
                if now > alone_at:
                    log.warning("SIGTERM came to this rank, and not to seat %d: it ends", silent[0])
                    return False
            elif mesh.me.seat == min(together) and view.generation != planned:
                planned = view.generation
                log.warning("%s (SIGTERM): a checkpoint is written after this step", ASKED_TO_END)
                plan(ASKED_TO_END)
        return True

    def save(self) -> None:
        """Write the last checkpoint, for as long as that takes; then end, if this rank was asked
        to. One that is lent was not, and is given back."""
        self._begun.set()
        self._save()
        if self.is_asked:
            term_signal.end()

    def close(self, write_out: Callable[[], None]) -> None:
        """Leave SIGTERM to the program again, at the end of its training; one that comes meanwhile
        ends this process once its checkpoints are written.

        Args:
            write_out: waits for them.
        """
        self._begun.set()
        try:
            write_out()
        finally:
            self._is_over = True  # first: the thread looks at both in the other order
            if self._signal is not None:
                self._signal.stop()
                self._signal = None
            if self.is_asked:
                term_signal.end()


def _silent(mesh: Mesh, view: View, seats: Iterable[int]) -> list[int]:
    """Return the seats whose ranks have not said that they were asked."""
    return [seat for seat in seats if mesh.peek(view.generation, f"{ASKED}{seat}") is None]
