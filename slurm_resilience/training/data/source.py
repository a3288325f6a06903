"""Read batches from a dataset that is asked by index, or from a stream in its own order.

One thread at a time reads a source, so it need not be safe for threads (unless ``threads`` > 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.training.compat import forget_workers
from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.data.order import SampleOrder, mix, share
from slurm_resilience.training.data.process_numbers import drawn_since, read_states
from slurm_resilience.training.data.settings_watch import CHANGED, SettingsWatch
from slurm_resilience.training.data.warn_once import WarnOnce

Kind = Literal["map", "items", "batches"]
"""map: samples by index; items: an IterableDataset, one sample after the other; batches: anything
else that can be iterated, a torch DataLoader among them."""

FIRST_SAMPLES = 4
"""Samples of a stream that are compared between the ranks."""

Collate = Callable[[list[Any]], Any]


class SampleError(SresError):
    """The source raised; its error is the cause of this one.

    Attributes:
        number: the batch in which it happened.
        index: the sample at fault; None: the source does not say.
    """

    def __init__(self, error: Exception, number: int, index: int | None = None) -> None:
        self.number = number
        self.index = index
        what = "the source" if index is None else f"sample {index}"
        super().__init__(f"{what} failed at batch {number}: {type(error).__name__}: {error}")


class SourceSample(NamedTuple):
    """The answer of a source for a batch number."""

    kind: Literal["batch", "end", "absent"]
    """end: the source has no such batch; absent: everyone must fetch it for himself."""
    batch: Any = None
    note: dict[str, Any] = {}  # noqa: RUF012  # never changed
    """For a stream: the epoch, batches of it so far, samples in the global batch."""
    state: Any = None
    """For a stream: its iterator's state after this batch; None: it has none."""


Before = Callable[[], SourceSample | None]


class Reader(Protocol):
    """A source, asked for batches by number."""

    def read(self, number: int, rank: int, world: int, before: Before) -> SourceSample:
        """Fetch a share of a batch.

        Args:
            before: gives the batch before this one, if it is known: a stream goes on from there.

        Raises:
            SampleError: the source raised.
        """

    def close(self) -> None:
        """Let go of threads and iterators."""


def kind_of(source: Any) -> Kind:
    """Return the kind of a source.

    Raises:
        UsageError: it can be neither indexed nor iterated.
    """
    if isinstance(source, IterableDataset):
        return "items"
    if isinstance(source, DataLoader):
        return "batches"
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return "map"
    if hasattr(source, "__iter__"):
        return "batches"
    raise UsageError(
        f"{type(source).__name__} is no source of batches: it needs __getitem__ and __len__,"
        " or __iter__; or give a function without arguments that opens it"
    )


def is_opener(source: Any) -> bool:
    """Tell whether it is a function, or a class, that opens the source when it must be read."""
    if isinstance(source, type):
        return True
    return callable(source) and not any(hasattr(source, n) for n in ("__getitem__", "__iter__"))


class SourceInfo(msgspec.Struct, frozen=True):
    """Facts of a source that must be known before anything is read."""

    kind: Kind
    length: int | None = None
    """Samples; None: a stream."""


def about(source: Any) -> SourceInfo:
    """Look at a source that is open."""
    kind = kind_of(source)
    return SourceInfo(kind, len(source) if kind == "map" else None)


class Opening:
    """A source, or a function that opens it: called once, when something is read first."""

    def __init__(self, source: Any) -> None:
        self._open = source if is_opener(source) else None
        self._source = None if self._open is not None else source
        self.expected: SourceInfo | None = None

    def __call__(self) -> Any:
        if self._source is None:
            assert self._open is not None
            source = self._open()
            found = about(source)
            if self.expected is not None and found != self.expected:
                raise UsageError(
                    f"the source has changed: it has {found.length} samples, and had"
                    f" {self.expected.length} when its cache was made; remove that with clean()"
                )
            self._source = source
        return self._source


GLOBAL_NUMBERS = (
    "the dataset (or its collate_fn) draws from the process's own random numbers ({whose}): "
    "batches are fetched ahead by another thread, so after a fault the dataset and the model "
    "(dropout) draw others, and ranks that were seeded alike draw the same. Give it a generator of "
    "its own, seeded by the sample's index: torch.Generator().manual_seed(index)"
)


class MapReader:
    """Samples by index, collated.

    Args:
        source: opened with the first batch that is read.
        threads: samples that are read at the same time.
        warn: is told of what a program should not do.
        ahead: batches are read before they are asked for.
    """

    def __init__(
        self,
        source: Callable[[], Any],
        order: SampleOrder,
        collate: Collate,
        threads: int,
        warn: WarnOnce = lambda text: None,
        *,
        ahead: bool = True,
    ) -> None:
        self._warn = warn
        self._ahead = ahead
        self._has_read = False
        self._settings: SettingsWatch | None = None
        """None: they are not known yet, or may change."""
        self._open = source
        self._order = order
        self._collate = collate
        self._pool = ThreadPoolExecutor(threads, "sres-sample") if threads > 1 else None

    def read(self, number: int, rank: int, world: int, before: Before) -> SourceSample:
        if self._has_read:
            if self._settings is not None and (names := self._settings.changed()):
                self._warn(CHANGED.format(names=names))
                self._settings = None
            return self._read(number, rank, world)
        self._has_read = True
        # The training waits for the first batch, and draws nothing meanwhile.
        states = read_states()
        found = self._read(number, rank, world)
        if drawn := drawn_since(states):
            self._warn(GLOBAL_NUMBERS.format(whose=" and ".join(drawn)))
        if self._ahead:
            self._settings = SettingsWatch(self._open(), self._collate)
        return found

    def _read(self, number: int, rank: int, world: int) -> SourceSample:
        begin, end = self._order.share(number, rank, world)
        # A rank without a sample takes part in the step's collectives with weight 0.
        indices = self._order.indices(number, begin, max(end, begin + 1))
        try:
            source = self._open()
        except SresError:
            raise
        except Exception as error:
            raise SampleError(error, number) from error
        samples = self._samples(source, indices.tolist(), number)
        try:
            return SourceSample("batch", self._collate(samples))
        except Exception as error:
            raise SampleError(error, number) from error

    def _samples(self, source: Any, indices: list[int], number: int) -> list[Any]:
        def one(index: int) -> Any:
            try:
                return source[index]
            except Exception as error:
                raise SampleError(error, number, index) from error

        if self._pool is not None:
            return list(self._pool.map(one, indices))
        if hasattr(source, "__getitems__"):
            try:
                return list(source.__getitems__(indices))
            except Exception as error:
                raise SampleError(error, number) from error
        return [one(index) for index in indices]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class StreamReader:
    """Batches one after the other, epoch after epoch.

    Going back, or starting in the middle, uses the iterator's own state where it has one, and else
    begins the epoch again and skips.

    Args:
        items: the source gives samples: ``global_batch`` of them are a batch, of which each rank
            keeps its share. Else it gives whole batches, and its split over ranks is its own.
        epochs: how often it is begun again; None: without end.
    """

    def __init__(
        self,
        source: Callable[[], Any],
        items: bool,
        order: SampleOrder,
        collate: Collate,
        epochs: int | None,
    ) -> None:
        self._open = source
        self._items = items
        self._order = order
        self._collate = collate
        self._epochs = epochs
        self._iterator: Iterator[Any] | None = None
        self._loader: DataLoader[Any] | None = None
        """The source, if it is one: its workers may die."""
        self._number = 0
        """The batch that the iterator gives next."""
        self._epoch = 0
        self._at = 0
        """Batches of this epoch that were taken."""
        self._end: int | None = None
        self._first: Any = None
        """A dataset's own state before it was read; None: it has none."""
        self.first_read = (0, 0)
        """The first batch that this process read, counted from 1, and a checksum of its first
        samples as they were before they are shared out; (0, 0): none was read."""

    def read(self, number: int, rank: int, world: int, before: Before) -> SourceSample:
        try:
            self._go(number, before)
            taken = self._take()
            if taken is None:
                return SourceSample("end")
            note = {"epoch": self._epoch, "at": self._at, "size": 0}
            if self._items:
                if not self.first_read[0]:
                    self.first_read = (number + 1, content_digest(taken[:FIRST_SAMPLES]))
                begin, end = share(len(taken), rank, world)
                note["size"] = len(taken)
                begin = min(begin, len(taken) - 1)
                taken = self._collate(taken[begin : max(end, begin + 1)])
            return SourceSample("batch", taken, note, self._state())
        except Exception as error:
            self.close()
            if isinstance(error, SresError):
                raise
            if self._loader is not None:
                forget_workers(self._loader)
            raise SampleError(error, number) from error

    def close(self) -> None:
        self._iterator = None

    def _go(self, number: int, ask: Before) -> None:
        """Bring the iterator to a batch."""
        reached = self._iterator is not None and self._number <= number
        if reached and self._number == number:
            return
        before = ask()
        if before is not None and before.note and (not reached or before.state is not None):
            self._begin(before.note["epoch"], before.state)
            if before.state is None:
                self._skip(before.note["at"])
            self._number, self._at = number, before.note["at"]
            return
        if not reached:
            self._begin(0, self._first)
            self._number = 0
        while self._number < number and self._take() is not None:
            pass

    def _begin(self, epoch: int, state: Any) -> None:
        source = self._open()
        again = self._iterator is not None or self._number > 0
        if not again and self._first is None:
            self._first = _state_before(source)
        self._loader = source if isinstance(source, DataLoader) else None
        _seed(source, self._order.seed, epoch)
        if state is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(deepcopy(state))
        iterator = iter(source)
        if iterator is source and again and state is None:
            raise UsageError(
                "the source can be read only once, and a batch that was given already is wanted"
                " again; give something that can be iterated anew (a DataLoader, a list)"
            )
        if state is not None and not hasattr(source, "load_state_dict"):
            iterator.load_state_dict(deepcopy(state))
        self._iterator, self._epoch, self._at, self._end = iterator, epoch, 0, None

    def _state(self) -> Any:
        holders: tuple[Any, ...] = (self._iterator, self._open())
        for holder in holders:
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                return deepcopy(holder.state_dict())
        return None

    def _skip(self, batches: int) -> None:
        assert self._iterator is not None
        count = batches * (self._order.global_batch if self._items else 1)
        for _ in islice(self._iterator, count):
            pass

    def _take(self) -> Any:
        """Return the next batch (a list of samples for items); None: the run is over."""
        if self._end is not None and self._number >= self._end:
            return None
        while True:
            assert self._iterator is not None
            count = self._order.global_batch if self._items else 1
            taken = list(islice(self._iterator, count))
            if len(taken) == count or (taken and not self._order.drop_last):
                self._number += 1
                self._at += 1
                return taken if self._items else taken[0]
            once = iter(self._iterator) is self._open()
            if self._at == 0:
                raise UsageError("the source gave not one batch in a whole epoch; is it empty?")
            if once or (self._epochs is not None and self._epoch + 1 >= self._epochs):
                self._end = self._number
                return None
            self._begin(self._epoch + 1, None)


def _state_before(source: Any) -> Any:
    """Return the state of a dataset that was not read yet: one that keeps its place in itself goes
    on from there when it is iterated anew. None: it has none, or not before it is read."""
    read = getattr(source, "state_dict", None)
    if read is None or not hasattr(source, "load_state_dict"):
        return None
    if not isinstance(source, IterableDataset):
        return None
    with suppress(Exception):
        return deepcopy(read())
    return None


class _Generator(torch.Generator):
    """One of ours, to be told from one that the user gave."""


def _seed(source: Any, seed: int, epoch: int) -> None:
    """Make the order of an epoch a function of ``(seed, epoch)``.

    A DataLoader without a generator draws from torch's global one: its order could not be repeated,
    and drawing in a background thread would disturb the training's own random numbers.
    """
    holders: list[Any] = [source]
    holders += [getattr(source, name, None) for name in ("sampler", "dataset")]
    for holder in holders:
        if hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)
    if not isinstance(source, DataLoader):
        return
    for holder in (source, source.sampler):
        if not isinstance(holder, DataLoader | RandomSampler):
            continue
        if holder.generator is None or isinstance(holder.generator, _Generator):
            holder.generator = _Generator()
            holder.generator.manual_seed(mix(mix(seed) + epoch) >> 1)
