"""`Watch`: marks from the main thread, verdicts in the mesh's thread; no thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.messages import Heartbeat
from slurm_resilience.mesh.model import Peer
from slurm_resilience.training.watch import limit as limits
from slurm_resilience.training.watch import stacks
from slurm_resilience.training.watch.hang import HangVerdict, RankSign, judge, judge_returned
from slurm_resilience.training.watch.progress import COLLECTIVE, PAUSED, RETURNED, Progress
from slurm_resilience.training.watch.straggler import Straggler, stragglers

log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0
"""Seconds without a word after which a peer is silent."""
WINDOW = 50
"""Own times that are kept of each seat."""
FIRSTS = 20
"""First steps of worlds whose times are kept."""
_COUNT = "#"
"""Separates phase and count of collectives in a beat."""

HINT = "what takes long on purpose belongs into `with s.watch.pause():`"
HINTS = {"returned": "all ranks return at the same step"}
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
        self.floor, self.ceiling, self.first, self.silence = floor, ceiling, first, silence
        self._on_hang = on_hang
        self._stacks = stacks
        self._clock = clock
        self._progress = Progress(clock)
        self._steps: deque[float] = deque(maxlen=limits.WINDOW)
        self._firsts: deque[float] = deque(maxlen=FIRSTS)
        self._hung: int | None = None
        self._own: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._counted: dict[int, int] = {}
        self._new_world = True
        self._id, self._seat = "", -1
        self._count: Callable[[], int] | None = None
        self._seen = (-1, clock())
        """Collectives entered, and when that number changed."""
        self._told: object = None

    # -- from the runner that forms a world --------------------------------------------------

    def enter(self, id: str, seat: int, collectives: Callable[[], int] | None = None) -> None:
        """A new world begins. Its first step is neither judged by nor added to what was learnt.

        Args:
            id: this process's id among its peers.
            seat: its seat.
            collectives: how many collectives this process has entered in this world, e.g.
                `compat.collective_counter`; may be called in any thread.
        """
        self._id, self._seat, self._count = id, seat, collectives
        self._new_world = True
        self._progress.abandon()
        self._own.clear()
        self._counted.clear()
        self._seen = (-1, self._clock())

    def hung(self) -> None:
        """The world that is being left stood still in the step that is under way. If that was only
        slow, it must not be found again: its next try has all the time of a first step."""
        self._hung = self._progress.last.step

    # -- from the main thread -----------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins, or goes on with its next batch (accumulated gradients)."""
        self._progress.begin(step)

    def mark(self, phase: str) -> None:
        """The main thread is in this phase now; ``collective`` while it waits for others."""
        self._progress.mark(phase)

    def commit(self, step: int) -> None:
        """The step is committed."""
        seconds = self._progress.commit(step)
        if self._new_world:
            self._new_world = False
            if seconds > 0:
                self._firsts.append(seconds)
        elif seconds > 0:
            self._steps.append(seconds)
            self._own[self._seat].append(self._progress.own_seconds)

    def returned(self) -> None:
        """The block has returned: this process does nothing any more that others could wait for."""
        self.mark(RETURNED)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around a collective: this time is not the process's own."""
        return self._during(COLLECTIVE)

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Enclose what may take as long as it likes, on any rank: evaluation, an export. No rank is
        accused meanwhile, except of silence."""
        return self._during(PAUSED)

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        before = self._progress.last.phase
        self.mark(phase)
        try:
            yield
        finally:
            self.mark(before)

    # -- from the mesh's thread ---------------------------------------------------------------

    @property
    def limit(self) -> float:
        """Seconds that a step may stand still."""
        if not self._new_world:
            return self._learnt
        # A step may have been finished by some before all left it.
        again = self._hung is not None and 0 <= self._progress.last.step - self._hung <= 1
        firsts = () if again else tuple(self._firsts)
        how = (self.floor, self.ceiling, self.first)
        return limits.learn_first(tuple(self._steps), firsts, *how)

    @property
    def _learnt(self) -> float:
        return limits.learn(tuple(self._steps), self.floor, self.ceiling, self.first)

    def beat(self) -> Heartbeat:
        """Return what to tell the peers."""
        sign = self._sign(self._clock())
        phase = sign.phase
        if phase and sign.collectives >= 0:
            phase = f"{phase}{_COUNT}{sign.collectives}"
        return Heartbeat(sign.step, phase, sign.since, self._progress.own_seconds)

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
        peers = [_heard(peer, beat, heard) for peer, beat, heard in beats.values()]
        for (_, beat, _), peer in zip(beats.values(), peers, strict=True):
            if beat.seconds > 0 and self._counted.get(peer.seat) != beat.step:
                self._counted[peer.seat] = beat.step
                self._own[peer.seat].append(beat.seconds)
        own = self._sign(now)
        verdict = judge(own, peers, self.limit, self.ceiling, max(self.silence, silence))
        if any(peer.phase == RETURNED for peer in peers):
            verdict = judge_returned(own, peers, self._learnt) or verdict
        if verdict is None:
            self._told = None
        else:
            self._tell(verdict, own)
        return verdict

    def stragglers(self) -> list[Straggler]:
        """The seats that hold up the others, slowest first.

        Needs marks where this process waits for others (`listen`, `waiting`); without them all
        own times are alike.
        """
        return stragglers({seat: tuple(own) for seat, own in self._own.copy().items()})

    def _sign(self, now: float) -> RankSign:
        last = self._progress.last
        count = -1
        if self._count is not None:
            with contextlib.suppress(Exception):  # the group is being left
                count = self._count()
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
    phase, _, count = beat.phase.partition(_COUNT)
    number = int(count) if count.isdigit() else -1
    return RankSign(peer.id, peer.seat, beat.step, phase, number, beat.since, heard)
