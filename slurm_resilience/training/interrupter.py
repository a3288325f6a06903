"""Get a process out of its block when its world is over, from the mesh's threads."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import os
import threading
from collections.abc import Callable

from slurm_resilience.clock import SYSTEM_CLOCK, Clock
from slurm_resilience.launcher import control_socket, exit_codes
from slurm_resilience.mesh.messages import Heartbeat
from slurm_resilience.mesh.model import GenerationEnd, Peer, View
from slurm_resilience.training.participant import Participant
from slurm_resilience.training.process_group import ProcessGroups
from slurm_resilience.training.recovery.exceptions import Interrupted
from slurm_resilience.training.watch import stacks
from slurm_resilience.training.watch.slow_hook import MOST_SECONDS, SlowHook

log = logging.getLogger("sres.training")

JOIN_SECONDS = 0.1
"""When another rank joins or leaves, ranks are cut that are still in the step before it after this
time; those that have begun the next one, which cannot be finished any more, at once."""
NUDGE_SECONDS = 0.5
"""A block that is in no collective when its world ends is interrupted after this time."""
JOIN_SHARE = 0.4
"""The part of the abort timeout for what a loop does after its update when another rank joins. The
rest must be enough to get out."""

TELL_SHARE = 0.5
"""After this part of the abort timeout a rank that is still in its block says where, before the
others go on."""


class BlockStage(enum.Enum):
    """Stage of a block that tells whether its thread may be interrupted.

    OUTSIDE → INSIDE (enter) → INTERRUPTED (once, when its world is over) → OUTSIDE (leave).
    """

    OUTSIDE = "outside"
    INSIDE = "inside"
    INTERRUPTED = "interrupted"


class Interrupter:
    """Answers the mesh's calls. Made in the thread that the block runs in.

    Args:
        participant: this process in its worlds.
        groups: the process groups of the current world; the block's thread fills and clears it.
        abort_timeout: seconds in which a process must be out of its block.
        event: called with a name and details of what happened.
        clock: tells the time.
    """

    def __init__(
        self,
        participant: Participant,
        groups: list[ProcessGroups],
        *,
        abort_timeout: float,
        event: Callable[..., None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._participant = participant
        self._groups = groups
        self._abort_timeout = abort_timeout
        self._event = event
        self._clock = clock
        self._main = threading.get_ident()
        self._end_seen = 0.0
        self._told = False
        self._stage = BlockStage.OUTSIDE
        self.on_resize = SlowHook()
        """The program's hook that runs before the block, if it does."""
        self._lock = threading.Lock()
        """Held while the stage changes, and while the block is interrupted."""

    def enter(self) -> None:
        """Note that a new world's block begins. Called by its thread."""
        self._end_seen, self._told = 0.0, False
        with self._lock:
            self._stage = BlockStage.INSIDE

    def leave(self) -> None:
        """Note that the block is left, by whatever way. Called by its thread, not interrupted from
        here on: between two worlds that would leave the work of leaving half done.

        Raises:
            Interrupted: it came as this was called.
        """
        # What is on its way is raised in here. To call it back (NULL in place of the exception)
        # leaves CPython 3.11 and 3.12 with a note that there is one: under a profiler or a debugger
        # the thread's next call of a function then never begins.
        try:
            with self._lock:
                self._stage = BlockStage.OUTSIDE
            for _ in range(2):
                pass
        except Interrupted:
            self._stage = BlockStage.OUTSIDE

    def cut(self, end: GenerationEnd) -> None:
        """Have the block's collectives raise: the world is over. Called again until it is left."""
        now = self._clock.monotonic()
        self._end_seen = self._end_seen or now
        if self._finishes(end) and now - self._end_seen < JOIN_SECONDS:
            return
        for group in list(self._groups):
            group.cut()
        seen = now - self._end_seen
        if seen > self._patience(end):
            with self._lock:
                # An update under way is finished, by every rank that has begun it.
                is_inside = self._stage is BlockStage.INSIDE and not self._participant.updating
                if is_inside and _raise_in(self._main, Interrupted):
                    self._stage = BlockStage.INTERRUPTED
        if seen > TELL_SHARE * self._abort_timeout and not self._told:
            self._told = True
            where = stacks.innermost(self._main)
            log.warning("still in its block %.1f s after the end of its world: %s", seen, where)

    def _finishes(self, end: GenerationEnd) -> bool:
        """Tell whether this rank is still in the step after which its world was ended, or in what
        its loop does after that."""
        participant = self._participant
        if end.kind != "join":
            return False
        return participant.step < end.step or participant.updates.after_update

    def _patience(self, end: GenerationEnd) -> float:
        """Seconds after which a block that is in no collective is interrupted."""
        if end.kind == "join" and self._participant.updates.after_update:
            return max(NUDGE_SECONDS, JOIN_SHARE * self._abort_timeout)
        return NUDGE_SECONDS

    def evicted(self, reason: str) -> None:
        """Leave: the others go on without this process. If it does not come out by itself, it
        ends."""
        if not self._participant.mesh.wait_until_out(self._abort_timeout):
            log.error("the others go on without this process (%s), which hangs: it ends", reason)
            os._exit(exit_codes.POISONED)

    def given_up(self, peer: Peer, reason: str) -> None:
        """Ask the launcher to end a peer that the others go on without, where it is this one's."""
        if peer.node == self._participant.where.node and peer.pid:
            # Beside the mesh's thread: the launcher may be held up, and others listen for beats.
            asks = threading.Thread(target=control_socket.evict, args=(peer.pid, reason))
            asks.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread to be had: its other peers ask too
                asks.start()

    def tick(self, now: float) -> Heartbeat | None:
        """Look whether the step hangs; this process's progress, for the others."""
        watch, mesh = self._participant.watch, self._participant.mesh
        self._look_at_hook(now)
        if watch is None:
            return None
        view = mesh.current
        if view is not None and mesh.end is None and mesh.status.phase in ("running", "done"):
            inside = {member.peer.id for member in view.members}
            beats = {name: beat for name, beat in mesh.beats().items() if name in inside}
            if reason := watch.left_out(beats):
                self._leave_to_be_healed(view, reason)
            if mesh.status.phase == "done":
                return watch.beat()
            self._participant.plan_change()
            verdict = watch.stalled(now, beats, silence=mesh.silence)
            if verdict is not None and self._participant.in_world:
                end = GenerationEnd(view.generation, verdict.reason, verdict.culprit or "", "hang")
                self._event("hang", reason=verdict.reason)
                mesh.over(end)
        return watch.beat()

    def _look_at_hook(self, now: float) -> None:
        """Tell of `on_resize` where it takes long; end a world that waits for it without end."""
        participant, hook = self._participant, self.on_resize
        watch, seconds = participant.watch, hook.seconds(now)
        if hook.is_to_be_told(now):
            where = stacks.innermost(self._main)
            log.warning("on_resize has taken %.0f s, and all ranks wait: %s", seconds, where)
        mesh = participant.mesh
        view, judges = mesh.current, watch is not None and not watch.is_paused
        if seconds <= MOST_SECONDS or not judges or view is None or mesh.end is not None:
            return
        if view.size > 1:  # no rank waits for one that is alone, and has the last copy
            reason = f"seat {participant.where.seat} was in on_resize for {seconds:.0f} s"
            mesh.over(GenerationEnd(view.generation, reason, mesh.me.id, "hang"))

    def _leave_to_be_healed(self, view: View, reason: str) -> None:
        """End the world: this rank left out an update, and is to be healed from the others."""
        participant, mesh = self._participant, self._participant.mesh
        if participant.in_world and participant.guards.left_out.heals(
            view, participant.step, reason
        ):
            if mesh.status.phase == "done":
                # Its function has returned, and says nothing more before the next world.
                participant.healer.distrust(reason)
                mesh.say(participant.status("done"))
            mesh.over(GenerationEnd(view.generation, reason, mesh.me.id, "fault"))


def _raise_in(thread: int, kind: type[BaseException]) -> bool:
    """Raise in a thread, when it calls a function or goes round in a loop the next time; tell
    whether that was done.

    Until a new thread runs, CPython knows it by the number of the one that starts it, and would
    raise there instead: the block would never hear of it.
    """
    if any(one.ident is None for one in threading.enumerate()):
        return False
    call = ctypes.pythonapi.PyThreadState_SetAsyncExc
    call(ctypes.c_ulong(thread), ctypes.py_object(kind))
    return True
