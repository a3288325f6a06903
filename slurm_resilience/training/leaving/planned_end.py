"""The end of a world that is planned, so that all its ranks leave it after the same step.

A rank that ends a world between two steps has the others leave the step that they have begun
meanwhile. So the end is told one step ahead, or in the middle of a long one: each rank then ends
the world where it comes to that step, and no work is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd, View
from slurm_resilience.training.leaving.departure import Departure
from slurm_resilience.training.leaving.last_save import ASKED_TO_END, LastSave

LAST_STEP = "sres/last-step"
"""The key that holds a world's last step, and why it ends."""


class PlannedEnd:
    """The end of the present world, as this rank knows it.

    Args:
        last_save: the request to end the training.
        write_alone: writes the last checkpoint without the other ranks, and ends this process.
    """

    def __init__(
        self, last_save: LastSave | None = None, write_alone: Callable[[], None] = lambda: None
    ) -> None:
        self.departure = Departure()
        self.last_save = last_save or LastSave()
        self._write_alone = write_alone
        self.seen_news = -1
        """The mesh's news that were looked at, and left nothing to do; negative: they did."""
        self._looked_at = (0, -1)
        """Generation and step of the last look: a loop that looks again, and makes no step between,
        waits for the change."""
        self._checked_at = (0, -1)
        """The same of the program's own last `s.check()`: a loop over a step's batches is none."""

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

    def look(self, mesh: Mesh, generation: int, step: int) -> bool:
        """End the world, between two steps, if it was planned so. Tell whether it was.

        Args:
            mesh: this process among the others.
            generation: the world's number.
            step: committed steps.
        """
        planned = mesh.peek(generation, LAST_STEP)
        waits, self._looked_at = self._looked_at == (generation, step), (generation, step)
        if planned is None:
            return False
        if mesh.end is not None:
            return True
        last, _, reason = planned.decode().partition(" ")
        if step >= int(last) or waits:
            text = f"{reason} after step {step}"
            mesh.over(GenerationEnd(generation, text, "", "join", step=step))
        return True

    def idles(self, generation: int, step: int) -> bool:
        """Note that the program itself asks whether the world is over; tell whether it asks again,
        and has made no step meanwhile.

        Args:
            generation: the world's number.
            step: committed steps.
        """
        before, self._checked_at = self._checked_at, (generation, step)
        return before == self._checked_at

    def enter(self, mesh: Mesh, view: View, step: int) -> None:
        """Note that this rank's state is whole in a world, and no step of it has begun.

        Args:
            mesh: this process among the others.
            view: the world.
            step: committed steps.
        """
        if self.last_save.enter(mesh, view, step):
            self._end_lent(mesh, view, step)

    def come_to(self, mesh: Mesh, view: View, step: int, *, idles: bool) -> bool:
        """End, between two steps, with the last checkpoint of a training that was asked to end;
        tell whether the end is to come.

        Args:
            mesh: this process among the others.
            view: the world.
            step: committed steps.
            idles: the program asks again, and has made no step meanwhile.
        """
        if self.last_save.come_to(mesh, view, step, idles=idles):
            self._end_lent(mesh, view, step)
        return self.last_save.has_promised(view)

    def end_alone(self) -> None:
        """End with a checkpoint by this rank alone, outside of the block, where no world comes any
        more in which all could write it."""
        if self.last_save.is_alone:
            self._write_alone()

    def _end_lent(self, mesh: Mesh, view: View, step: int) -> None:
        """Leave a training that has ended with its last checkpoint, on a rank that is lent."""
        self.departure.is_over = True
        mesh.over(GenerationEnd(view.generation, ASKED_TO_END, "", "join", step=step))

    def close(self, write_out: Callable[[], None]) -> None:
        """End with the training: SIGTERM is the program's own again.

        Args:
            write_out: waits for the checkpoints under way.
        """
        self.last_save.close(write_out)
        self.departure.close()
