"""Hear what the training itself tells: that it can re-form its world, how it goes, how it ended.

A program that uses `slurm_resilience.training` meets in the shared directory ``$SRES_DIR``. Of a
plain one that `sres-run` started, the launchers do: a node is one seat of their world, which goes
on when all are there. Here is all that the supervisor knows of either.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.rank_variables import CHECKPOINTLESS
from slurm_resilience.mesh.rendezvous import LAUNCHERS, TrainingOutcome
from slurm_resilience.resume import report
from slurm_resilience.resume.attempt import read_file
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.crash_watch import GatheringStage
from slurm_resilience.resume.fence import Fence
from slurm_resilience.resume.live_step.live_steps import EndWord, StepEnd
from slurm_resilience.resume.live_step.living_program import (
    LAUNCHER,
    uses_training_library,
)
from slurm_resilience.resume.live_step.seats import SeatMap, seat_map
from slurm_resilience.resume.srun.stderr_reader import killed_from_outside
from slurm_resilience.resume.srun.step import SrunStep, find_step
from slurm_resilience.wire.frames import UNREADABLE

if TYPE_CHECKING:
    from slurm_resilience.mesh.observer import Observer

SAY_SECONDS = 60.0
"""Between two lines that a training is not watched over yet."""
WATCH_SECONDS = 60.0
"""For a training to be watched: the shared file system, this machine's memory or its threads may
fail for a moment."""
TRY_SECONDS = 1.0
"""Between two tries."""
_RENDEZVOUS = ("mesh", "mesh.*", "run/*/mesh", f"run/*/{LAUNCHERS}")
"""Below the directory: where the ranks meet by themselves, and through their launchers; then where
the launchers do, for a program that has no world of its own."""
UNANNOUNCED_SECONDS = 120.0
"""For the ranks of an elastic step to announce a training, before it is said that none has."""
OUTCOME_BYTES = 1 << 20
"""The most that an outcome may have: another user may have put anything in its place."""
SETTLE_SECONDS = 20.0
"""For the ranks that launchers have started to announce a world of their own, before the program is
taken for a plain one."""


def find_rendezvous(directory: str) -> Path | None:
    """Return where the training of this attempt meets; None: it has not announced itself yet, or
    that cannot be seen just now."""
    if not directory:
        return None
    # The shared file system may fail for a moment (ESTALE, EIO): it is looked at again soon.
    with contextlib.suppress(OSError):
        for pattern in _RENDEZVOUS:
            for path in sorted(Path(directory).glob(pattern)):
                with contextlib.suppress(OSError):
                    if any((path / "peers").iterdir()):
                        return path
    return None


def is_launchers(rendezvous: Path) -> bool:
    """Return whether launchers meet here: their ranks have no world of their own."""
    return rendezvous.name == LAUNCHERS


def read_outcome(rendezvous: Path) -> TrainingOutcome | None:
    """Return how the training ended; None: it goes on."""
    try:
        data = read_file(rendezvous / "outcome", OUTCOME_BYTES)
        return msgspec.json.decode(data, type=TrainingOutcome)
    except (OSError, *UNREADABLE):
        return None


def stage_of(watched: tuple[Path, Observer] | None) -> GatheringStage:
    """Return how far a training is of which not all seats have been seen.

    Args:
        watched: where it meets, and its observer; None: it has not announced itself. Launchers
            tell nothing of their ranks.
    """
    if watched is None or is_launchers(watched[0]):
        return GatheringStage.UNKNOWN
    rendezvous, observer = watched
    if observer.picture().running:
        return GatheringStage.STEPS
    outcome = read_outcome(rendezvous)
    over = outcome is not None and outcome.code == 0
    return GatheringStage.OVER if over else GatheringStage.GATHERS


class TrainingWatch:
    """The trainings of all attempts, as they announce themselves."""

    def __init__(self, context: SupervisorContext, fence: Fence, *, lives: bool) -> None:
        """
        Args:
            context: of the supervised srun.
            fence: its directory is where a training meets.
            lives: steps are started so that they outlive a node.
        """
        self._context = context
        self._fence = fence
        self._advised = False
        self._node_of_seat: dict[int, str] = {}
        """As the ranks of this attempt told it, those included that have died since."""
        self._tried: tuple[float, float] | None = None
        """When a training could not be watched first, and last, on the monotonic clock."""
        self._connected = 0.0
        """When the training was first seen, on the monotonic clock."""
        self._told: float | None = None
        """When it was said last that a training is not watched over, or could have been."""
        self._lost_in_training = 0
        """So many of the step's bad ends came while it trained: the others went on without them."""
        self.lives = lives
        """Steps are started so that they outlive a node."""

    def connect(self, stack: contextlib.ExitStack) -> tuple[Path, Observer] | None:
        """Return where the training meets, and its observer; None: it has not announced itself, or
        cannot be watched now.

        Args:
            stack: ends the watching.
        """
        now = self._context.clock.monotonic()
        rendezvous = find_rendezvous(self._fence.directory)
        if rendezvous is None or (self._tried is not None and now - self._tried[1] < TRY_SECONDS):
            return None
        try:
            observing = self._context.host_calls.observe(rendezvous, self._context.wake.set)
            observer = stack.enter_context(observing)
        except (SresError, OSError, RuntimeError) as error:
            since = self._tried[0] if self._tried is not None else now
            self._tried = since, now
            if now - since < WATCH_SECONDS:
                return None
            report.say(f"the training cannot be watched ({error}): it is stopped when a node dies")
            self.lives = False
            return None
        self._tried = None
        self._context.wake.set()
        self._node_of_seat.clear()
        self._lost_in_training = 0
        self._connected = self._context.clock.monotonic()
        return rendezvous, observer

    def has_moved(self, rendezvous: Path) -> bool:
        """Return whether ranks have announced a world since their launchers were found here."""
        return is_launchers(rendezvous) and find_rendezvous(self._fence.directory) not in (
            None,
            rendezvous,
        )

    def seat_map(
        self, step: SrunStep, nodes: tuple[str, ...], watched: tuple[Path, Observer]
    ) -> SeatMap | None:
        """Return the node of every seat; None: not all seats have been seen yet.

        Args:
            step: the attempt's.
            nodes: those that it was started on.
            watched: where the training meets, and its observer.
        """
        rendezvous, observer = watched
        connected_for = self._context.clock.monotonic() - self._connected
        if is_launchers(rendezvous) and connected_for < SETTLE_SECONDS:
            return None
        known = self._seat_map(step, nodes, observer)
        if known is not None and is_launchers(rendezvous):
            return msgspec.structs.replace(known, needs_all=True)
        running = bool(observer.picture().running)
        if known is None and (running or self._told is not None):
            self._tell_unwatched(running)
        return known

    def note_losses(self, step: SrunStep, watched: tuple[Path, Observer]) -> None:
        """Count the tasks that are lost while the training goes on: they are no failure of what
        comes after it.

        Args:
            step: the attempt's.
            watched: where it meets, and its observer.
        """
        ended = len(step.ended_tasks)
        rendezvous, observer = watched
        if ended == self._lost_in_training or not observer.picture().running:
            return
        # Each rank that is done writes its outcome before it does anything else.
        if read_outcome(rendezvous) is None:
            self._lost_in_training = ended

    def _tell_unwatched(self, running: bool) -> None:
        now = self._context.clock.monotonic()
        self._told = now if self._told is None else self._told
        if now - self._told >= SAY_SECONDS:
            self._told = now
            begins = "the training steps, but" if running else "the training does not step, and"
            report.say(
                f"{begins} nothing of it is started again yet when it is lost: not all of its "
                "seats were seen, or Slurm does not show its step"
            )

    def _seat_map(
        self, step: SrunStep, nodes: tuple[str, ...], observer: Observer
    ) -> SeatMap | None:
        picture = observer.picture()
        self._node_of_seat |= {peer.seat: peer.node for peer in picture.peers}
        node_of_seat = self._node_of_seat
        whole = max((peer.seats for peer in picture.peers), default=0)
        size = self._context.allocation.companions.size
        # Of an elastic step, the job's own nodes are there from the start.
        seats = whole if size is None else whole * len(nodes) // size.most
        all_nodes = set(nodes) <= set(node_of_seat.values())
        if not picture.running or not all_nodes or len(node_of_seat) < seats:
            return None
        known = seat_map(nodes, node_of_seat, self._tasks_of(step), seats)
        return (
            known
            if known is None
            else msgspec.structs.replace(known, seats=max(whole, known.seats))
        )

    def _tasks_of(self, step: SrunStep) -> int:
        """Return the number of a step's tasks; 0: neither its nodes nor slurmctld have told it."""
        told = step.reports.whole_step()
        if told is not None:
            return told[1]
        context = self._context
        info = find_step(step, context.client, context.allocation.id, context.host)
        return info.tasks if info else 0

    def told_end(self, step: SrunStep) -> StepEnd | None:
        """Return the end of a step as its training or a person told it; None: nothing was told.

        Args:
            step: it has ended, and not all of its seats have been seen.
        """
        if not self.lives:
            return None
        rendezvous = find_rendezvous(self._fence.directory)
        outcome = read_outcome(rendezvous) if rendezvous is not None else None
        if outcome is not None and outcome.code == 0 and step.code and not self._only_lost(step):
            # What failed may have come after it; another attempt would train once more.
            return StepEnd(step.code, step, late_code=step.code)
        if outcome is not None:
            return StepEnd(outcome.code, step, word=EndWord.TRAINING)
        told = step.told_end
        if killed_from_outside(step.ended_tasks) and (told.cancelled or told.aborted):
            # A task's own crash does not end such a step, so it does not explain the end either.
            word = EndWord.SIGNALLED if step.only_signalled else EndWord.PERSON
            return StepEnd(step.code, step, word=word)
        return None

    def _only_lost(self, step: SrunStep) -> bool:
        """Return whether all that failed in a step was lost before its training ended."""
        ended = len(step.ended_tasks)
        by_itself = not step.killed_by and not step.failed_nodes
        if not by_itself or not 0 < ended == self._lost_in_training:
            return False
        # srun is told nothing of tasks that Slurm ends with the job.
        return self._context.allocation.state_now() in ("RUNNING", "SUSPENDED")

    def advise(self, ran_for: float) -> None:
        """Say once that the program could live on, but its step was not started so; or that it is
        to change its size, and seems to be none that can.

        Args:
            ran_for: seconds since the attempt was started.
        """
        announced = find_rendezvous(self._fence.directory) is not None
        if self._advised or self.lives == announced:
            return
        context, size = self._context, self._context.allocation.companions.size
        if self.lives:
            if size is not None and ran_for >= UNANNOUNCED_SECONDS:
                self._advised = True
                report.say(
                    f"no training was announced within {ran_for:.0f} s: the step keeps its size "
                    "until one is. Only a program that uses slurm_resilience.training can change it"
                )
            return
        self._advised = True
        if context.environment.get(CHECKPOINTLESS) != "0" and not uses_training_library(
            context.command, context.environment
        ):
            report.say(
                "this program can go on when a node dies, but its step was not started so: write "
                f"export {CHECKPOINTLESS}=1 before srun, or start it by {LAUNCHER}"
            )
