"""The checkpoint with which a training ends that was asked to: by all ranks, or by one alone."""

from __future__ import annotations

import logging
from collections.abc import Callable

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import View
from slurm_resilience.training.leaving import term_signal
from slurm_resilience.training.recovery.commit_gate import PEER_WORD_SECONDS
from slurm_resilience.training.recovery.exceptions import Interrupted
from slurm_resilience.training.recovery.healer import Healer

log = logging.getLogger("sres.training")


class LastCheckpoint:
    """Writes the state after the last step.

    Args:
        healer: has the state.
        write_out: waits for the checkpoint under way; tells whether its world is still there.
        core: ranks that are asked to end together, by their seats; 0: all are.
        is_whole: each rank has the whole model.
    """

    def __init__(
        self, healer: Healer, write_out: Callable[[], bool], *, core: int, is_whole: bool
    ) -> None:
        self._healer = healer
        self._write_out = write_out
        self._core = core
        self._is_whole = is_whole

    @property
    def _step(self) -> int:
        return self._healer.progress.step

    def write(self, mesh: Mesh, view: View) -> None:
        """Write it with all ranks of the world.

        Args:
            mesh: this process among the others.
            view: the world.

        Raises:
            Interrupted: the world has ended before it was written.
        """
        healer, step = self._healer, self._step
        if self._write_out() and not healer.has_saved(step):
            healer.save_last()
            self._write_out()
        if not healer.has_saved(step):
            mesh.wait_for_end(PEER_WORD_SECONDS)
            if mesh.is_left:  # a rank is gone: the next world writes it
                raise Interrupted(mesh.end.reason if mesh.end else mesh.evicted)
        if view.members[0].peer.id == mesh.me.id:
            text = "the training ends after step %d, as it was asked to%s"
            log.warning(text, step, self._lack())

    def may_be_by_one(self, mesh: Mesh) -> bool:
        """Tell whether this process is the one to write it by itself: where the ranks that are left
        may form no world, each of them has the whole model, and this one is as far as any.

        Args:
            mesh: this process among the others.
        """
        _, present, _ = mesh.picture()
        asked = [one for one in present if one.peer.seat < self._core or not self._core]
        whole = [one for one in asked if one.status.step >= 0 and not one.status.dirty]
        best = max(whole, key=lambda one: (one.status.step, -one.peer.seat), default=None)
        is_possible = self._is_whole and best is not None
        is_first = not mesh.evicted and mesh.me.seat == min(one.peer.seat for one in asked)
        if is_first and not is_possible:
            log.warning("asked to end (SIGTERM), without a checkpoint: ranks are missing")
        return best is not None and is_possible and best.peer.id == mesh.me.id and not mesh.evicted

    def write_alone(self) -> None:
        """Write it without the other ranks, outside of the block, and end this process."""
        try:
            self._healer.save_alone()
        except Exception:
            log.exception("no last checkpoint is written")
        text = "the training ends after step %d, as it was asked to (SIGTERM), with ranks missing%s"
        log.warning(text, self._step, self._lack())
        term_signal.end()

    def _lack(self) -> str:
        return ", without a checkpoint of it" if self._healer.lacks_copy(self._step) else ""
