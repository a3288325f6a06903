"""Leave a training on request, between two steps: the mirror of a join.

The ranks of a node that is lent for a while (a companion of an elastic job) get SIGTERM when Slurm
takes it back, and the rest of the partition's GraceTime to go. The one that leaves ends the world
as a rank does that joins, and is gone before the next one is formed: no step is lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.training.leaving.term_signal import TermSignal

log = logging.getLogger("sres.training")


class Departure:
    """The request to leave, if there was one."""

    def __init__(self) -> None:
        self.reason = ""
        """Empty: this process was not asked to leave."""
        self.is_over = False
        """The training has ended with its last checkpoint: this process is of no more use."""
        self._told = False
        self._signal: TermSignal | None = None

    def on_term(self, meanwhile: Callable[[], None]) -> None:
        """Take SIGTERM as the request, from now on.

        Args:
            meanwhile: called in a thread of its own with each request.
        """
        if threading.current_thread() is not threading.main_thread():
            log.warning("SIGTERM ends this process: only the main thread could have it leave")
            return

        def ask() -> None:
            self.reason = "SIGTERM: its node is taken back"
            meanwhile()

        self._signal = TermSignal()
        self._signal.listen(ask)

    def close(self) -> None:
        """Let SIGTERM end this process again: its training is over."""
        if self._signal is not None:
            self._signal.stop()
            self._signal = None

    def wish(self, mesh: Mesh, step: int) -> str:
        """Return why the world is to end, in words; empty: this process was not asked to leave, or
        may not.

        Args:
            mesh: this process among the others.
            step: committed steps.
        """
        if not self.reason or not self.may_leave(mesh, step):
            return ""
        return f"seat {mesh.me.seat} leaves ({self.reason})"

    def may_leave(self, mesh: Mesh, step: int) -> bool:
        """Return whether others have all that this process holds of the model: else it stays until
        they have healed a newcomer from it, or Slurm ends it.

        Args:
            mesh: this process among the others.
            step: committed steps.
        """
        if self.is_over or mesh.may_leave(step):
            return True
        if not self._told:
            self._told = True
            log.warning("seat %d alone holds its part of the model: it stays", mesh.me.seat)
        return False
