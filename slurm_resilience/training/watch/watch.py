"""`Watch`: marks from the main thread, verdicts in the mesh's thread; no thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.messages import Heartbeat
from slurm_resilience.mesh.model import Peer
from slurm_resilience.resume import attempt
from slurm_resilience.resume.progress.straggler import OwnTimes, Straggler
from slurm_resilience.training.watch import limit as limits
from slurm_resilience.training.watch import lockstep, stacks
from slurm_resilience.training.watch.collective_count import CollectiveCount
from slurm_resilience.training.watch.hang import HangVerdict, RankSign, judge, judge_returned
from slurm_resilience.training.watch.lockstep import Made
from slurm_resilience.training.watch.progress import COLLECTIVE, PAUSED, RETURNED, Progress
from slurm_resilience.training.watch.step_times import StepTimes

log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0
"""Seconds without a word after which a peer is silent."""
_MORE = "#"
"""Separates phase, count of collectives and the batch under way in a beat."""

HINT = "what takes long on purpose belongs into `with s.watch.pause():`"
HINTS = {
    "returned": "all ranks return at the same step",
    "alone": "all ranks call the same collectives, a barrier too, as often",
}
"""Advice on a stall, where it is not that of `HINT`."""


class Watch:
    """Watches over one process and, through its peers' beats, over its world.

    The main thread calls `begin`, `mark`, `commit`; the mesh's thread `beat`, `stalled` and
    `stragglers`; the runner that forms a world calls `enter`.
    """

    def __init__(
        self,
        *,
        floor: float = limits.FLOOR_SECONDS,
        ceiling: float = limits.CEILING_SECONDS,
        first: float = limits.FIRST_SECONDS,
        silence: float = SILENCE_SECONDS,
        on_hang: Callable[[HangVerdict], None] | None = None,
        stacks: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = SYSTEM_CLOCK.monotonic,
    ) -> None:
        """
        Args:
            floor: seconds; a step that stands still for less is never a hang.
            ceiling: seconds; a step that stands still for more always is one, even if no rank can
                be accused.
            first: seconds for the first steps of a training, which compile and allocate. The first
                step of a later world has less (`limit.learn_first`), unless it hung before.
            silence: seconds without a word after which a peer is silent.
            on_hang: called once for each stall, in the thread that calls `stalled`.
            stacks: directory for the stacks of all threads when training hangs; None: not written.
            clock: seconds, never going back.

        Raises:
            UsageError: the limits are not in order.
        """
        if not 0 < floor <= ceiling or first <= 0 or silence <= 0:
            raise UsageError(f"Watch: 0 < floor <= ceiling is wanted, not {floor} and {ceiling}")
        self.silence = silence
        self._times = StepTimes(floor, ceiling, first)
        self._own_times = OwnTimes()
        self._on_hang = on_hang
        self._stacks = stacks
        self._clock = clock
        self.progress = Progress(clock)
        """Marks of the main thread. A step calls them without a method of the watch between."""
        self._lockstep = lockstep.Lockstep()
        self._id, self._seat = "", -1
        self._count = CollectiveCount()
        self._seen = (-1, clock())
        """Collectives entered, and when that number changed."""
        self._told: object = None
        self._telling = threading.Lock()

    # -- from the runner that forms a world --------------------------------------------------

    def enter(
        self,
        id: str,
        seat: int,
        collectives: Callable[[], int] | None = None,
        world: int = 0,
        *,
        replaced: bool = False,
    ) -> None:
        """Begin a new world. Its first step is neither judged by nor added to what was learnt.

        Args:
            id: this process's id among its peers.
            seat: its seat.
            collectives: how many collectives this process has entered in this world, e.g.
                `compat.collective_counter`; may be called in any thread.
            world: the world's number, the same on all ranks.
            replaced: this process has the seat of one that was ended.
        """
        self._learn()
        if replaced:
            self._times.slow.replaced(seat)
        self._lockstep.enter(world)
        self._id, self._seat, self._count = id, seat, CollectiveCount(collectives)
        self._times.enter()
        self.progress.abandon()
        self._own_times.clear()
        self._seen = (-1, self._clock())

    def hung(
        self, culprit: str = "", beats: Mapping[str, tuple[Peer, Heartbeat, float]] | None = None
    ) -> None:
        """Note that the world that is being left stood still in the present step. If that was only
        slow, it must not be found again: its next try has all the time of a first step.

        Args:
            culprit: id of the process at fault; empty: none in particular.
            beats: as in `stalled`.
        """
        self._times.hung(self.progress.last.step)
        signs = [self._sign(self._clock()), *(_heard(*beat) for beat in (beats or {}).values())]
        for sign in signs:
            if sign.id == culprit:
                self._times.slow.hung(sign)

    # -- from the main thread -----------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin a step, or go on with its next batch (accumulated gradients)."""
        self._count.begin()
        self.progress.begin(step)
        steps = self._lockstep
        steps.begin(step, self._count.since_first_step if steps.counts else -1)

    def waits_in_update(self) -> None:
        """Mark that the update of this step waits for the others."""
        self.mark(COLLECTIVE)
        self._lockstep.waits_in_update(self._count.since_first_step)

    def mark(self, phase: str) -> None:
        """Note the main thread's phase; ``collective`` while it waits for others."""
        self.progress.mark(phase)

    def commit(self, step: int) -> None:
        """Note that the step is committed."""
        self.progress.commit(step)

    def returned(self) -> None:
        """Note that the block returned: nothing of this process can be waited for any more."""
        self.mark(RETURNED)
        self._tell_pause()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Enclose a collective: its time is not the process's own."""
        return self._during(COLLECTIVE)

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Enclose what may take as long as it likes, on any rank: evaluation, an export. No rank is
        accused meanwhile, except of silence."""
        return self._during(PAUSED)

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        before = self.progress.last.phase
        self.mark(phase)
        if phase == PAUSED:
            self._tell_pause()
        try:
            yield
        finally:
            self.mark(before)

    # -- from the mesh's thread ---------------------------------------------------------------

    @property
    def limit(self) -> float:
        """Seconds that a step may stand still."""
        self._learn()
        return self._times.limit(self.progress.last.step)

    def beat(self) -> Heartbeat:
        """Return what to tell the peers; learn from the steps since the last beat, and tell the
        supervisor."""
        self._learn()
        sign = self._sign(self._clock())
        phase, begun = sign.phase, lockstep.told(self._lockstep.next)
        if phase and (sign.collectives >= 0 or begun):
            phase = f"{phase}{_MORE}{sign.collectives}"
        if phase and begun:
            phase = f"{phase}{_MORE}{begun}"
        return Heartbeat(sign.step, phase, sign.since, self.progress.own_seconds)

    def stalled(
        self,
        now: float,
        beats: Mapping[str, tuple[Peer, Heartbeat, float]],
        *,
        silence: float = 0.0,
    ) -> HangVerdict | None:
        """Judge whether this world stands still, and by whose fault.

        Args:
            now: seconds on the monotonic clock.
            beats: of the other members of this world only, by id: who, what it last said, and
                seconds since it was heard of.
            silence: seconds without a word that mean nothing; counts if it is more than the
                watch's own, as in large worlds, where beats come less often.

        Returns:
            None, or the same verdict until something moves.
        """
        for peer, beat, _ in beats.values():
            self._own_times.heard(peer.seat, beat.step, beat.seconds)
        own = self._sign(now)
        if own.still <= self._times.floor:
            # Less than any limit: most beats end here, before one is learnt from the last steps.
            self._told = None
            return None
        peers = [_heard(peer, beat, heard) for peer, beat, heard in beats.values()]
        verdict = judge(own, peers, self.limit, self._times.ceiling, max(self.silence, silence))
        if any(peer.phase == RETURNED for peer in peers):
            verdict = judge_returned(own, peers, self._times.without_a_first) or verdict
        verdict = self._alone(own, beats) or verdict
        if verdict is None:
            self._told = None
            return None
        slow = next((one for one in (own, *peers) if one.id == verdict.culprit), None)
        waits = slow is not None and slow.still <= self._times.slow.seconds(slow)
        if waits and verdict.kind != "silent":
            if slow is own:
                self._tell(verdict, own)  # for all, who wait as well
            return None
        self._tell(verdict, own)
        return verdict

    def left_out(self, beats: Mapping[str, tuple[Peer, Heartbeat, float]]) -> str:
        """Tell by whom it is seen that this process left out an update; empty: it did not.

        Args:
            beats: as in `stalled`.
        """
        for peer, beat, _ in beats.values():
            *_, text = beat.phase.split(_MORE)
            begun = lockstep.heard(text)
            if self._lockstep.behind(begun):
                return (
                    f"seat {self._seat} left out an update that seat {peer.seat} made, before step "
                    f"{begun.step} (an error that its loop caught has to leave the function, and a "
                    "batch that is skipped is skipped by all ranks)"
                )
        return ""

    def _alone(
        self, own: RankSign, beats: Mapping[str, tuple[Peer, Heartbeat, float]]
    ) -> HangVerdict | None:
        """Tell whether this process and another one wait in collectives that do not belong
        together: that is certain, and needs none of the patience of a first step."""
        for peer, beat, heard in beats.values() if own.phase != PAUSED else ():
            other = _heard(peer, beat, heard)
            if other.phase in ("", PAUSED, RETURNED) or other.still <= self._times.floor:
                continue
            begun = lockstep.heard(beat.phase.split(_MORE)[-1])
            made = self._lockstep.more_collectives(own.collectives, begun, other.collectives)
            if made is not Made.NEITHER:
                more, less = (own, other) if made is Made.HERE else (other, own)
                text = f"seat {more.seat} waits in a collective that seat {less.seat} has not made"
                reason = f"{text} in as many batches (step {more.step})"
                return HangVerdict("alone", reason, more.id, more.seat)
        return None

    def stragglers(self) -> list[Straggler]:
        """Return the seats that hold up the others, slowest first.

        Needs marks where this process waits for others (`listen`, `waiting`); without them all
        own times are alike.
        """
        self._learn()
        return self._own_times.stragglers()

    def _learn(self) -> None:
        """Learn from the steps since the last time, and tell the supervisor."""
        committed = self.progress.committed
        if not committed:
            return
        with self._telling:
            step, own = -1, []
            while committed:
                step, seconds, own_seconds = committed.popleft()
                # The first step of a world compiles: its time tells nothing of a node.
                if self._times.committed(seconds):
                    self._own_times.add(self._seat, own_seconds)
                    own.append(own_seconds)
            if step >= 0:
                attempt.step(step, sum(own) / len(own) if own else 0.0, max(0, self._seat))

    @property
    def is_paused(self) -> bool:
        """True in a `pause`."""
        return self.progress.last.phase == PAUSED

    def _tell_pause(self) -> None:
        self._learn()  # a step that was told later would end the pause
        with self._telling:
            attempt.pause(max(0, self._seat))

    def _sign(self, now: float) -> RankSign:
        last = self.progress.last
        count = self._count.since_first_step
        if count != self._seen[0]:
            self._seen = (count, now)
        since = max(0.0, now - max(last.at, self._seen[1]))
        return RankSign(self._id, self._seat, last.step, last.phase, count, since)

    def _tell(self, verdict: HangVerdict, own: RankSign) -> None:
        key = (verdict.kind, verdict.culprit, own.step, own.collectives)
        if key == self._told:
            return
        self._told = key
        hint = HINTS.get(verdict.kind, HINT)
        log.warning("training stands still: %s (%s)", verdict.reason, hint)
        if self._stacks is not None:
            name = f"seat-{self._seat:05d}"
            stacks.dump(Path(self._stacks) / f"stacks-{name}.txt", name, verdict.reason)
        if self._on_hang is not None:
            try:
                self._on_hang(verdict)
            except Exception:
                log.exception("on_hang failed; the watch goes on")


def _heard(peer: Peer, beat: Heartbeat, heard: float) -> RankSign:
    phase, count, *_ = f"{beat.phase}{_MORE}".split(_MORE)
    number = int(count) if count.isdigit() else -1
    return RankSign(peer.id, peer.seat, beat.step, phase, number, beat.since, heard)
