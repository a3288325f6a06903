"""Save once more where a whole training is asked to end.

Slurm sends SIGTERM to all processes of a job that is preempted, cancelled or at its time limit, and
SIGKILL later, after KillWait (30 s by default) or a GraceTime. Until then a step can be finished,
and a checkpoint of it be written::

    SIGTERM ─► this rank promises to begin no step after the one that it is in: a key of the world
            ─► all have promised ─► the highest of their steps is the last one, which each knows
            ─► that step ─► checkpoint, by all ranks ─► each ends, by SIGTERM

No rank plans the end for the others: its word could come to one that has begun the next step, and
waits in it for ranks that write the checkpoint and wait for that one.

Where one rank alone gets the signal, something else ends that rank, and the others go on. Where a
rank has died, and the others may not go on without it, one that has the whole model saves it alone.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd, View
from slurm_resilience.training.leaving import term_signal
from slurm_resilience.training.leaving.term_signal import TermSignal

log = logging.getLogger("sres.training")

PROMISE = "sres/asked/"
"""Before the number of a seat: a key that says that its rank was asked to end, and the last step
that it begins before all others have said so."""
SAVED = "sres/saved/"
"""Before the number of a seat: a key that says that its rank has done its part of the last
checkpoint."""
ASKED_TO_END = "all ranks were asked to end"
ALL_ASKED_SECONDS = 5.0
"""Slurm's SIGTERM comes to all nodes within so long."""
STEP_SECONDS = 60.0
"""A step that is not over by then may hang. KillWait is 30 s by default."""
BETWEEN_SECONDS = 3.0
"""Without a next world for so long, ranks are missing, or are ended because one has failed."""
PART_SECONDS = 5.0
"""For the others' parts of a checkpoint, when this rank's is done: they are about to be."""
LOOK_SECONDS = 0.05


class LastSave:
    """The request to end, if there was one.

    Args:
        core: ranks that are asked together, by their seats: those of an elastic job's own nodes; 0:
            all are.
        save: writes a checkpoint, with all ranks of the world.
        wake: has the main thread look at the next place between two steps.
        alone: tells, where no world comes any more, whether this rank is to save what it has.
    """

    def __init__(
        self,
        core: int = 0,
        save: Callable[[Mesh, View], None] = lambda *_: None,
        wake: Callable[[], None] = lambda: None,
        alone: Callable[[Mesh], bool] = lambda _: False,
    ) -> None:
        self._core = core
        self._save = save
        self._wake = wake
        self._alone = alone
        self._lock = threading.Lock()
        """Held while a promise is made, and while the main thread looks whether one was."""
        self._entered = -1
        """The generation whose state is whole here, so that steps may begin."""
        self._promised = (-1, 0)
        """A generation, and the last step that this rank begins in it before all have promised."""
        self._told = threading.Event()
        """Set when the end was told to people."""
        self._saves = threading.Event()
        """Set while the last checkpoint is under way."""
        self._closing = threading.Event()
        self._over = threading.Event()
        self._signal: TermSignal | None = None
        self.is_asked = False
        self.is_alone = False
        """No world comes any more, and this process writes the last checkpoint by itself."""

    def on_term(
        self, world: Callable[[], tuple[Mesh, View | None] | None], step: Callable[[], int]
    ) -> None:
        """Take SIGTERM as the request, from now on, unless the program has a handler of its own.

        Args:
            world: the mesh and the present world, None between two; None: there is no state yet.
            step: returns the committed steps.
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
                comes = not self._over.is_set() and self._comes_to_end(world, step)
            except Exception:
                log.exception("no last checkpoint is written")
            if not comes:  # after an error, too: no process stays deaf to SIGTERM
                term_signal.end()

        self._signal = TermSignal()
        self._signal.listen(asked)

    def _comes_to_end(
        self, world: Callable[[], tuple[Mesh, View | None] | None], step: Callable[[], int]
    ) -> bool:
        """Promise in each world to end with the others, until the training is over. False: this
        rank ends at once, since another one was not asked, or no step is finished."""
        told, alone_at = -1, 0.0
        seen = SYSTEM_CLOCK.monotonic()
        last = seen + STEP_SECONDS
        while not self._closing.wait(LOOK_SECONDS):
            now = SYSTEM_CLOCK.monotonic()
            if self._saves.is_set():  # that takes as long as it takes
                seen, last = now, now + STEP_SECONDS
                continue
            found = world()
            if found is None or now > last:
                return False
            mesh, view = found
            if now > seen + BETWEEN_SECONDS:
                self.is_alone = self._alone(mesh)
                if self.is_alone:  # the main thread leaves the mesh, and saves
                    mesh.close("it was asked to end")
                return self.is_alone and self._closing.wait(STEP_SECONDS)
            if view is None:
                continue
            seen = now
            if not self._promise(mesh, view, step, begun=1):
                continue
            if view.generation != told:
                told, alone_at = view.generation, now + ALL_ASKED_SECONDS
            if not (silent := self._silent(mesh, view)):
                self._tell(mesh, view)
            elif now > alone_at:
                log.warning("SIGTERM came to this rank, and not to seat %d: it ends", silent[0])
                return False
        return True

    def _promise(self, mesh: Mesh, view: View, step: Callable[[], int], *, begun: int) -> bool:
        """Promise the last step that this rank begins in a world, before all others have promised;
        tell whether it has. Not before its state is whole there.

        Args:
            mesh: this process among the others.
            view: the world.
            step: returns the committed steps.
            begun: steps that may be under way.
        """
        with self._lock:
            if self._entered != view.generation:
                return False
            if self._promised[0] == view.generation:
                return True
            # The main thread begins no step from here on without a look. One that it has begun
            # before is the next one.
            self._wake()
            self._promised = (view.generation, step() + begun)
        mesh.put(view.generation, f"{PROMISE}{mesh.me.seat}", str(self._promised[1]).encode())
        return True

    def promise_with_others(self, mesh: Mesh, view: View, step: Callable[[], int]) -> None:
        """Promise on a rank that is not asked itself, being lent, when all that are asked have.
        From any thread.

        Args:
            mesh: this process among the others.
            view: the world.
            step: returns the committed steps.
        """
        if self._follows(mesh, view):
            self._promise(mesh, view, step, begun=1)

    def enter(self, mesh: Mesh, view: View, step: int) -> bool:
        """Note that this rank's state is whole in a world, and no step of it has begun. Tell
        whether the training has ended here, as in `come_to`.

        Args:
            mesh: this process among the others.
            view: the world.
            step: committed steps.
        """
        with self._lock:
            self._entered = view.generation
        if self.is_asked or self._follows(mesh, view):
            self._promise(mesh, view, lambda: step, begun=0)
        return self.come_to(mesh, view, step)

    def has_promised(self, view: View) -> bool:
        """Tell whether this rank must look between all steps of a world."""
        with self._lock:
            return self._promised[0] == view.generation

    def come_to(self, mesh: Mesh, view: View, step: int, *, idles: bool = False) -> bool:
        """Go on, between two steps, where this rank may. Else wait for what the others promise; and
        after the last step write its checkpoint, and end. A rank that is lent, and was not asked,
        lives on; tell it that the training has ended.

        Args:
            mesh: this process among the others.
            view: the world.
            step: committed steps.
            idles: the program asks again, and has made no step meanwhile.
        """
        with self._lock:
            generation, promised = self._promised
        if generation != view.generation:
            return False
        if step < promised:
            if idles and self._last_step(mesh, view) is not None and not mesh.is_left:
                # A program that waits for another world comes to no step. In the next one all
                # promise before the first.
                reason = f"{ASKED_TO_END} after step {step}"
                mesh.over(GenerationEnd(generation, reason, "", "join", step=step))
            return False
        while (last := self._last_step(mesh, view)) is None:
            if mesh.is_left:
                return False
            self._pause()
        if step < last or mesh.is_left:
            return False
        self._tell(mesh, view)
        self._saves.set()
        try:
            self._save(mesh, view)
        finally:
            self._saves.clear()
        self._wait_for_parts(mesh, view)
        if self.is_asked:
            term_signal.end()
        return True

    def _last_step(self, mesh: Mesh, view: View) -> int | None:
        """Return the training's last step; None: not all ranks have promised."""
        said = [mesh.peek(view.generation, f"{PROMISE}{seat}") for seat in _seats(view)]
        promised = [int(one) for one in said if one is not None]
        return max(promised) if len(promised) == len(said) else None

    def _follows(self, mesh: Mesh, view: View) -> bool:
        """Return whether this rank is lent, and ends with those that were asked: there are some,
        and all have said so."""
        is_lent = 0 < self._core <= mesh.me.seat
        return is_lent and min(_seats(view)) < self._core and not self._silent(mesh, view)

    def _silent(self, mesh: Mesh, view: View) -> list[int]:
        """Return the seats that are asked together, and whose ranks have not said that they
        were."""
        asked = [seat for seat in _seats(view) if seat < self._core or not self._core]
        return [seat for seat in asked if mesh.peek(view.generation, f"{PROMISE}{seat}") is None]

    def _tell(self, mesh: Mesh, view: View) -> None:
        with self._lock:
            is_told = self._told.is_set()
            self._told.set()
        if not is_told and mesh.me.seat == min(_seats(view)):
            log.warning("%s (SIGTERM): a checkpoint is written after this step", ASKED_TO_END)

    def _wait_for_parts(self, mesh: Mesh, view: View) -> None:
        """Wait for the others' parts of the checkpoint: the end of this process would break off
        what they do."""
        mesh.put(view.generation, f"{SAVED}{mesh.me.seat}", b"1")
        until = SYSTEM_CLOCK.monotonic() + PART_SECONDS
        while any(mesh.peek(view.generation, f"{SAVED}{seat}") is None for seat in _seats(view)):
            if mesh.is_left or SYSTEM_CLOCK.monotonic() > until:
                return
            self._pause()

    @staticmethod
    def _pause() -> None:
        SYSTEM_CLOCK.wait(threading.Event(), LOOK_SECONDS)

    def close(self, write_out: Callable[[], None]) -> None:
        """Leave SIGTERM to the program again, at the end of its training; one that comes meanwhile
        ends this process once its checkpoints are written.

        Args:
            write_out: waits for them.
        """
        self._closing.set()
        try:
            write_out()
        finally:
            self._over.set()  # first: the thread looks at both in the other order
            if self._signal is not None:
                self._signal.stop()
                self._signal = None
            if self.is_asked:
                term_signal.end()


def _seats(view: View) -> Iterable[int]:
    return [member.peer.seat for member in view.members]
