"""The end of a world that is planned, so that all its ranks leave it after the same step.

A rank that ends a world between two steps has the others leave the step that they have begun
meanwhile. So the end is told one step ahead, or in the middle of a long one: each rank then ends
the world where it comes to that step, and no work is lost.
"""

from __future__ import annotations

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.training.departure import Departure

LAST_STEP = "sres/last-step"
"""The key that holds a world's last step, and why it ends."""


class PlannedEnd:
    """The end of the present world, as this rank knows it."""

    def __init__(self) -> None:
        self.departure = Departure()
        self._unplanned_at = (0, -1)
        """Generation, and the mesh's changes of keys, at which no end was planned."""
        self._looked_at = (0, -1)
        """Generation and step of the last look: a loop that looks again, and makes no step between,
        waits for the change."""

    def plan(self, mesh: Mesh, generation: int, step: int, reason: str) -> None:
        """Have the world end after the step that is under way, or is next. From any thread.

        Args:
            mesh: this process among the others.
            generation: the world's number.
            step: committed steps.
            reason: for people.
        """
        if mesh.end is None and mesh.peek(generation, LAST_STEP) is None:
            mesh.put(generation, LAST_STEP, f"{step + 1} {reason}".encode())

    def look(self, mesh: Mesh, generation: int, step: int) -> None:
        """End the world, between two steps, if it was planned so.

        Args:
            mesh: this process among the others.
            generation: the world's number.
            step: committed steps.
        """
        # A step without news costs no look into the store, behind its lock.
        keys = generation, mesh.key_changes()
        planned = None if keys == self._unplanned_at else mesh.peek(generation, LAST_STEP)
        waits, self._looked_at = self._looked_at == (generation, step), (generation, step)
        if planned is None:
            self._unplanned_at = keys
            return
        if mesh.end is not None:
            return
        last, _, reason = planned.decode().partition(" ")
        if step >= int(last) or waits:
            text = f"{reason} after step {step}"
            mesh.over(GenerationEnd(generation, text, "", "join", step=step))
