"""One thread that keeps the next batches ready, and the place where the training takes them.

The thread is the only one that reads the source. Everything it shares with the training lies under
one condition; what it fetched for a share that is no longer wanted is dropped.

After a change of its share, and a move in the middle of a run, the window opens by one batch with
each that is given: a new world's first step, for which all its ranks wait, would else share the
interpreter's lock with the reading of ten batches. A run that begins reads all of it at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError
from slurm_resilience.training import thread_ends
from slurm_resilience.training.data.cache.codec import Packed, pack
from slurm_resilience.training.data.cache.sharing import ReplicaGroup
from slurm_resilience.training.data.cache.store import BatchKey, BatchStore, Window
from slurm_resilience.training.data.source import Reader, SourceSample
from slurm_resilience.training.data.warn_once import WarnOnce

log = logging.getLogger("sres.data")

PATIENCE_SECONDS = 60.0
"""Seconds that a group's member waits for the one who fetches, before it fetches itself."""

_GLANCE_SECONDS = 0.1

_MANY_BEFORE = 4
"""Notes of earlier batches, after which those that are not needed are let go of."""


class BatchTarget(NamedTuple):
    """The share of each batch that is wanted, and its place."""

    rank: int
    world: int
    reader: Reader
    store: BatchStore
    group: ReplicaGroup | None
    share: Callable[[int], str]
    """Names the share of a batch in keys."""
    stride: int = 1
    """Numbers of the source that one batch takes."""


class WindowLimits(NamedTuple):
    """Batches that are kept around the one that is given next, and the end of all."""

    ahead: int
    behind: int
    end: int | None
    """The first batch that the run does not have; None: the source says."""


class _Ready(NamedTuple):
    found: SourceSample
    loose: bool
    """Held in memory alone: the store has no room for it yet."""


class Prefetcher:
    """Batches ``next … next + ahead``, fetched before they are asked for.

    Args:
        place: the share that is wanted at first, and its reader.
        ahead: batches that are kept ready.
        behind: consumed batches that are kept.
        end: the first batch that the run does not have; None: the source says.
    """

    def __init__(
        self,
        place: BatchTarget,
        ahead: int,
        behind: int,
        end: int | None,
        warn: WarnOnce,
    ) -> None:
        self.next = 0
        """The batch that is given next."""
        self.committed = 0
        """The first batch that is not consumed."""
        self.end = end
        self._place = place
        self.limits = WindowLimits(ahead, behind, end)
        self._asked = False
        self._opened = ahead
        """Batches that may be read ahead by now, of those that are to be."""
        self._warn = warn
        self._ready: dict[int, _Ready] = {}
        self._before: dict[int, SourceSample] = {}
        """The batch before each one (its note and state alone), for streams."""
        self._error: tuple[int, Exception] | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> SourceSample | None:
        """Give the next batch; None: the run is over.

        Raises:
            SampleError: the source raised; asking again tries again.
        """
        with self._lock:
            number = self.next
            if self.end is not None and number >= self.end:
                return None
            ready = self._ready.get(number)
            if ready is None or self._thread is None:
                ready = self._ask_for(number)
            else:
                del self._ready[number]
            found = ready.found
            if found.kind == "end":
                self.end = number
                return None
            if ready.loose:
                self._keep_needed(number, found)
            self.next = number + self._place.stride
            self._opened += 1
            if found.note:
                self._before[self.next] = SourceSample(found.kind, None, found.note, found.state)
            self._changed.notify_all()
            return found

    def _ask_for(self, number: int) -> _Ready:
        """Have the thread get a batch that is not ready, and wait for it."""
        self._asked = True
        self._start()
        self._changed.notify_all()
        try:
            return self._wait(number)
        finally:
            self._asked = False

    def _wait(self, number: int) -> _Ready:
        while not self._stop.is_set():
            if number in self._ready:
                return self._ready.pop(number)
            # The thread may be busy with a slow source while the batch lies in the cache already.
            found = self._stored(self._place, number)
            if found is not None and found.kind != "absent":
                return _Ready(found, False)
            if self._error is not None and self._error[0] == number:
                error, self._error = self._error[1], None
                self._changed.notify_all()
                raise error
            # Not for longer: an exception that another thread sends here is seen between two waits.
            self._changed.wait(_GLANCE_SECONDS)
        raise UsageError("the loader was closed; make a new one")

    def move(self, number: int, place: BatchTarget | None = None) -> None:
        """Go on at another batch, and from now on with another share if ``place`` is given."""
        with self._changed:
            if place is not None:
                self._place = place
                # What came before a batch of all ranks is the same in any world.
                self._ready.clear()
            self._ready = {k: r for k, r in self._ready.items() if k >= number}
            self.next = self.committed = number
            if place is not None or self._thread is not None:
                self._opened = 0
            self.end = self.limits.end
            self._error = None
            self._tell()
            self._changed.notify_all()

    def commit(self, number: int) -> None:
        """Batches before ``number`` are consumed. It is called in each step."""
        with self._lock:
            self.committed = number
            if len(self._before) > _MANY_BEFORE:
                kept = number - self._place.stride
                self._before = {k: f for k, f in self._before.items() if k >= kept}
            if self._place.group is not None:
                self._tell()

    def before(self, number: int) -> SourceSample | None:
        """Note and state of what came before ``number``, where a stream goes on; None: unknown."""
        with self._changed:
            return self._before.get(number)

    def remember(self, number: int, before: SourceSample) -> None:
        """Remember, in the other direction, that a stream goes on from here at batch ``number``."""
        with self._changed:
            self._before[number] = before

    def stop(self, patience: float = thread_ends.PATIENCE_SECONDS) -> None:
        """End the thread. One that hangs in the source is left behind, and ends when it returns."""
        with self._changed:
            self._stop.set()
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience)
        self._place.reader.close()

    def _tell(self) -> None:
        if self._place.group is not None:
            self._place.group.tell(self.committed)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="sres-data", daemon=True)
            thread.start()
            self._thread = thread
            thread_ends.at_exit(self.stop)

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: collating must not take the training's cores
        while True:
            with self._changed:
                if self._stop.is_set():
                    return
                number = self._wanted()
                if number is None:
                    self._changed.wait()
                    continue
                place = self._place
            try:
                ready = self._obtain(place, number)
            except Exception as error:
                with self._changed:
                    if place is self._place:
                        self._error = (number, error)
                    self._changed.notify_all()
                continue
            with self._changed:
                if ready is not None and place is self._place and number >= self.next:
                    self._ready[number] = ready
                self._changed.notify_all()

    def _wanted(self) -> int | None:
        """Return the first batch of the window that is not ready; None: nothing to do now."""
        stride, opened = self._place.stride, max(self._opened, 1)
        ahead = max(min(opened, self.limits.ahead), int(self._asked))
        for number in range(self.next, self.next + ahead * stride, stride):
            if self.end is not None and number >= self.end:
                return None
            if self._error is not None and self._error[0] == number:
                return None
            ready = self._ready.get(number)
            if ready is None:
                return number
            if ready.loose or ready.found.kind == "end":
                return None
        return None

    def _obtain(self, place: BatchTarget, number: int) -> _Ready | None:
        """Get one batch, from the cache or the source; None: it is no longer wanted."""
        began = SYSTEM_CLOCK.monotonic()
        while True:
            found = self._stored(place, number)
            if found is not None and found.kind != "absent":
                return _Ready(found, False)
            waited = SYSTEM_CLOCK.monotonic() - began
            group = place.group
            if (
                group is None
                or found is not None
                or waited > PATIENCE_SECONDS
                or group.fetches(waited)
            ):
                return self._fetch(place, number)
            key = BatchKey(number, place.share(number))
            if place.store.beyond(key) and not place.store.has(key):
                return self._fetch(place, number)  # it was here, and has left again
            if self._stop.wait(min(0.002 + waited / 10, 0.05)) or place is not self._place:
                return None
            if number < self.next:
                return None

    def _fetch(self, place: BatchTarget, number: int) -> _Ready:
        try:
            found = place.reader.read(
                number, place.rank, place.world, lambda: self._previous(place, number)
            )
        except Exception:
            if place.group is not None:
                self._keep(place, number, SourceSample("absent"))
            raise
        if self._keep(place, number, found):
            kept = self._stored(place, number)
            if kept is not None:
                return _Ready(kept, False)
        return _Ready(found, True)

    def _previous(self, place: BatchTarget, number: int) -> SourceSample | None:
        known = self.before(number)
        if known is None and number >= place.stride:
            known = self._stored(place, number - place.stride)
        return known

    def _stored(self, place: BatchTarget, number: int) -> SourceSample | None:
        read = place.store.get(BatchKey(number, place.share(number)))
        if read is None:
            return None
        batch, state = read.batch
        return SourceSample(read.kind, batch, read.note, state)  # type: ignore[arg-type]

    def _keep(self, place: BatchTarget, number: int, found: SourceSample) -> bool:
        key = BatchKey(number, place.share(number))
        packed = self._packed(key, found)
        return packed is not None and place.store.put(key, packed, self._window(place, number))

    def _packed(self, key: BatchKey, found: SourceSample) -> Packed | None:
        try:
            return pack(str(key), found.kind, found.note, (found.batch, found.state))
        except Exception as error:
            self._warn(f"these batches cannot be cached: {type(error).__name__}: {error}")
            return None

    def _window(self, place: BatchTarget, number: int) -> Window:
        committed = self.committed
        lowest = committed if place.group is None else place.group.lowest(committed)
        first = self.next
        ahead, behind = (length * place.stride for length in self.limits[:2])
        return Window(lowest - behind, lowest, first, first + ahead, place.share(number))

    def _keep_needed(self, number: int, found: SourceSample) -> None:
        """Make room for the batch that is given now, or else say that it goes by uncached."""
        place = self._place
        key = BatchKey(number, place.share(number))
        packed = self._packed(key, found)
        if packed is not None:
            if place.store.put(key, packed, self._window(place, number)):
                return
            self._warn(f"no room in the cache for a batch of {packed.size} bytes: not cached")
        if place.group is not None:
            self._keep(place, number, SourceSample("absent"))
