"""``ReplayLoader``: batches by number, from a cache that outlives the process."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from slurm_resilience.errors import UsageError
from slurm_resilience.training.data.cache.cache import BatchCache, identity
from slurm_resilience.training.data.cache.fingerprint import fingerprint as look_at
from slurm_resilience.training.data.microbatch_reader import MicrobatchReader
from slurm_resilience.training.data.order import (
    Bounds,
    Indices,
    SampleOrder,
    bounds_of,
    last,
    share,
)
from slurm_resilience.training.data.prefetch import BatchTarget, Prefetcher
from slurm_resilience.training.data.source import (
    MapReader,
    Opening,
    Reader,
    SourceSample,
    StreamReader,
    about,
    is_opener,
)
from slurm_resilience.training.data.warn_once import warn_once
from slurm_resilience.training.elastic.plan import StepSpan, plan

log = logging.getLogger("sres.data")

Floats = NDArray[np.floating[Any]]

STATE_VERSION = 1


class Wanted(NamedTuple):
    """A world's wishes besides rank and size."""

    group: str
    leader: bool
    together: int
    microbatches: int
    """Those of a turn; 0: each turn is a share of one batch."""


class Given(NamedTuple):
    """Facts of the share that was given last."""

    which: Callable[[], Indices] = lambda: np.empty(0, np.int64)
    sizes: tuple[int, ...] = ()
    """Samples of each of its microbatches."""
    batch: int = 0
    """Samples of its batch over all ranks; 0: a full one's."""


class ReplayLoader:
    """Gives this rank's share of batch 0, 1, 2, …, and any of them again after a fault.

    A batch is known by its number: which samples it holds follows from the dataset's length,
    ``seed``, ``shuffle``, ``global_batch`` and ``drop_last``, and a rank's share of it from
    ``rank`` and ``world``. So every sample is given exactly once an epoch, whatever faults and
    changes of the world lie in between. Alone it is an ordinary loader::

        for batch in ReplayLoader(dataset, global_batch=32, epochs=3):
            ...

    A loop goes on where the last one stopped, and ends with the run, not with an epoch. With
    recovery, ``commit()`` says that the batches given so far are consumed, and ``rewind()`` goes
    back to the last commit. Until one of the two is called first, every batch counts as consumed
    when it is given (``autocommit``).

    Batches are fetched ahead by one thread and kept in mapped files that outlive the process; the
    next process on the seat gives its first batch without touching the source. What comes out is a
    private copy-on-write view of the file: writing into it changes nothing for others. Where
    the files lie, and how they go away again, is told in ``launcher/batch_directory.py``. A dataset
    that draws random numbers should draw them from a generator of its own: the thread shares
    torch's global one.

    Args:
        source: a map-style dataset (``__getitem__`` and ``__len__``); or a torch IterableDataset,
            whose items are split over the ranks; or a DataLoader or another iterable, which gives
            whole batches in its own order and keeps its own split; or a function without arguments
            that opens one of these, called only when something must really be read.
        global_batch: samples in a batch of all ranks together.
        rank: data-parallel rank of this process.
        world: data-parallel ranks.
        seed: of the permutations of the epochs.
        shuffle: False: samples in the dataset's order.
        epochs: epochs in the whole run; None: without end.
        steps: batches in the whole run; None: no limit.
        prefetch_length: batches kept ready ahead.
        lookback_length: consumed batches that are kept.
        cache: directory of the files; None or True: the job's place in ``/dev/shm``; False: batches
            are kept in this process's memory alone.
        max_bytes: bytes that the kept batches of a seat, or a group, may take. A batch that is
            larger goes by uncached.
        group: name of a replication group: processes on one node that need the same batches
            (tensor-parallel peers). One of them fetches, the others read its files.
        leader: this member fetches as long as it lives; else it does when no other member does.
        collate_fn: makes a batch of a list of samples; None: torch's ``default_collate``.
        drop_last: leave out the samples of an epoch that fill no whole batch.
        weights: (samples,) of a map-style dataset: how often each sample comes, beside the others.
            They need not sum to one. Samples are drawn by it and put back, as many in an epoch as
            the dataset has: some come twice, others never. As torch's WeightedRandomSampler does.
        threads: samples of a map-style dataset that are read at the same time (it must bear that).
        fingerprint: stands for the source's contents; empty: found by looking at it.
        autocommit: count a batch as consumed when it is given.
        name: tells this loader from others of the training, which never share its batches.
        microbatches: 0, or: ``global_batch`` is the size of a microbatch, positions and ``steps``
            count microbatches, and each turn gives the list of those microbatches that are this
            rank's of the next so many.
        together: with ``microbatches``: ranks that hold a model together and take turns.

    Attributes:
        samples: (share,) int64, sample indices of the last share; empty for whole batches.
        weight: what to multiply the mean loss of the last share with, so that the mean of the
            gradients over the ranks is that of the global batch: share * world / batch. It is 1
            where shares are equal, and 0 for a rank that got a sample only to take part in a short
            batch's collectives. Before the first share: that of a full batch.

    Raises:
        UsageError: the arguments make no batch, or the cache's directory is not private.
    """

    def __init__(
        self,
        source: Any,
        *,
        global_batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        steps: int | None = None,
        prefetch_length: int = 10,
        lookback_length: int = 2,
        cache: Path | str | bool | None = None,
        max_bytes: int = 1 << 30,
        group: str = "",
        leader: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        weights: Sequence[float] | Floats | torch.Tensor | None = None,
        threads: int = 1,
        fingerprint: str = "",
        autocommit: bool = True,
        name: str = "",
        microbatches: int = 0,
        together: int = 1,
    ) -> None:
        _check_whole(global_batch=global_batch, seed=seed, threads=threads)
        _check_whole(prefetch_length=prefetch_length, lookback_length=lookback_length)
        _check_whole(epochs=epochs, steps=steps)
        if min(steps or 0, epochs or 0) < 0:
            raise UsageError(f"steps={steps} and epochs={epochs} cannot be negative")
        # Not numpy's: both are part of the state that travels.
        global_batch, seed = int(global_batch), int(seed)
        if min(prefetch_length, lookback_length, max_bytes) < 0 or threads < 1:
            raise UsageError(
                "prefetch_length, lookback_length and max_bytes cannot be negative,"
                " and threads is at least 1"
            )
        _check(rank, world, global_batch, microbatches)
        self.rank, self.world = rank, world
        self.autocommit = autocommit
        self._given = Given()
        self.weight = 1.0 if microbatches else _weight(rank, world, global_batch)
        self._base = 0
        self._warn = warn_once()
        opening = Opening(source)
        known = None if is_opener(source) else about(source)
        bounds = None if weights is None else _bounds(weights, shuffle)
        drawn_by = "" if bounds is None else hashlib.blake2b(bounds.tobytes()).hexdigest()[:16]
        words: list[Any] = [fingerprint or look_at(source, collate_fn), name, seed, shuffle]
        words += [global_batch, drop_last] + ([drawn_by] if drawn_by else [])
        words += [known.length] if known and known.kind == "map" else ["stream", epochs]
        self._home = BatchCache(identity(words), cache, max_bytes, self._warn)
        self._home.settle(group, rank, leader)
        self._wanted = Wanted(group, leader, together, microbatches)
        found = known or self._home.about(lambda: about(opening()))
        opening.expected = found
        self.kind = found.kind
        if microbatches and self.kind == "batches":
            self._home.leave(remove=True)
            raise UsageError(
                "microbatches are made of samples: give the dataset itself, not a DataLoader or "
                "another source of whole batches"
            )
        if bounds is not None and (self.kind, found.length) != ("map", bounds.size):
            self._home.leave(remove=True)
            raise UsageError(
                f"weights= has {bounds.size} numbers, and takes one for each sample of a dataset "
                f"with __getitem__ and __len__; this source has {found.length or 'no'} samples"
            )
        self.order = SampleOrder(found.length or 0, global_batch, seed, shuffle, drop_last, bounds)
        self._own: dict[str, Any] = {
            "kind": self.kind,
            "length": self.order.length,
            "seed": seed,
            "shuffle": shuffle,
            "global_batch": global_batch,
            "drop_last": drop_last,
            "weights": drawn_by or None,
        }
        """Facts of the run that a position belongs to."""
        collate: Callable[[list[Any]], Any] = collate_fn or default_collate
        reader: Reader
        if self.kind == "map":
            if not self.order.per_epoch:
                self._home.leave(remove=True)
                raise UsageError(
                    f"the dataset's {found.length} samples do not fill a batch of {global_batch}:"
                    " make global_batch smaller, or give drop_last=False"
                )
            warn = self._warn if rank == 0 else lambda text: None
            ahead = prefetch_length > 0
            reader = MapReader(opening, self.order, collate, threads, warn, ahead=ahead)
        else:
            reader = StreamReader(opening, self.kind == "items", self.order, collate, epochs)
        self._reader = reader
        if self.kind == "batches":
            self.weight = 1.0
        end = last(self.order.per_epoch if found.length else None, epochs, steps)
        self._feed = Prefetcher(self._place(end), prefetch_length, lookback_length, end, self._warn)
        self._closing = weakref.finalize(self, _close, self._feed, self._home)

    def __iter__(self) -> Iterator[Any]:
        """Give the shares of batches from here on, until the run is over.

        Raises:
            SampleError: the source raised; asking again tries the same batch again.
        """
        # Who commits may come back to a run that is over, after a fault, and has nothing to do.
        if self.autocommit and self.end is not None and self._feed.next >= self.end:
            self._warn(f"the run of {self.end} batches is over; seek(0) would begin it again")
        while (found := self._take()) is not None:
            yield found.batch

    def __len__(self) -> int:
        """Batches in the whole run."""
        if self.end is None:
            raise TypeError("this loader has no length: it never ends, or its source has none")
        return self.end

    def _take(self) -> SourceSample | None:
        number = self._feed.next
        found = self._feed.take()
        if found is None:
            self._home.spent = True
            return None
        self._home.spent = False
        self._describe(number, found)
        if self.autocommit:
            self._feed.commit(self._feed.next)
        return found

    def _describe(self, number: int, found: SourceSample) -> None:
        """Know ``samples`` and ``weight`` of the share that is given."""
        if self.kind == "batches":
            return
        order = self.order
        if self._wanted.microbatches:
            sizes = tuple(found.note["sizes"])
            step, together = StepSpan(number, len(sizes)), self._wanted.together
            own = plan(step, self.world, together)[self.rank].own
            # A stream's samples have no indices of their own.
            own = own if self.kind == "map" else range(0)
            none = np.empty(0, np.int64)
            self._given = Given(
                lambda: np.concatenate([none, *(order.indices(one) for one in own)]), sizes
            )
            return
        if self.kind == "map":
            self._given = Given(partial(_indices, order, number, self.rank, self.world))
            if order.drop_last:
                return  # the weight is that of a full batch
            size = order.size(number)
            self._given = self._given._replace(batch=size)
        else:
            size = found.note["size"]
            begin, end = share(size, self.rank, self.world)
            first = (found.note["at"] - 1) * order.global_batch
            self._given = Given(
                lambda: np.arange(first + begin, first + end, dtype=np.int64), (), size
            )
        self.weight = _weight(self.rank, self.world, size)

    @property
    def end(self) -> int | None:
        """Batches in the whole run; None: it never ends, or only the source knows."""
        return self._feed.limits.end

    @property
    def drawn_by(self) -> str:
        """Stands for the weights; empty: there are none."""
        return self._own["weights"] or ""

    @property
    def samples(self) -> Indices:
        """Sample indices of the last share, (share,) int64; empty for whole batches. Worked out
        when asked for: most steps never ask."""
        return self._given.which()

    @property
    def unequal(self) -> int:
        """Samples of the last batch over all ranks, if they cannot share it evenly; else 0."""
        if self.kind == "batches":
            return 0
        size = self._given.batch or self.order.global_batch
        return size if size % self.world else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch of the last turn, over all ranks."""
        return self._given.sizes

    @property
    def first_read(self) -> tuple[int, int]:
        """The first batch that this process read of a stream of samples, counted from 1, and a
        checksum of its first samples, which every rank should have alike; else (0, 0)."""
        return getattr(self._reader, "first_read", (0, 0))

    @property
    def position(self) -> int:
        """The first batch that is not consumed: where a rewind, or a restart, goes on."""
        return self._feed.committed

    @property
    def next(self) -> int:
        """The batch that is given next: ``position`` and those given since."""
        return self._feed.next

    @property
    def epoch(self) -> int:
        """The epoch of ``position`` in a map-style dataset, from 0; 0 for a stream."""
        return self.order.epoch(self.position) if self.kind == "map" else 0

    def commit(self) -> None:
        """Note that the batches given so far are consumed, and never come again."""
        self.autocommit = False
        self._base = self._feed.next
        self._feed.commit(self._base)

    def rewind(self) -> None:
        """Go back to the last commit, or else to where the loader began."""
        self.autocommit = False
        self._feed.move(self._base)

    def seek(self, position: int) -> None:
        """Go on at batch ``position``; those before it count as consumed.

        Raises:
            UsageError: it is negative.
        """
        if position < 0:
            raise UsageError(f"there is no batch {position}; the first one is 0")
        self._base = position
        self._feed.move(position)

    def reshare(
        self,
        rank: int,
        world: int,
        *,
        group: str | None = None,
        leader: bool | None = None,
        microbatches: int = 0,
    ) -> None:
        """Go on at ``position`` in another world.

        Args:
            rank: data-parallel rank in it.
            world: data-parallel ranks in it.
            group: the replication group in it; None: as before.
            leader: whether this process leads that group; None: as before.
            microbatches: of a turn in it; 0: as before.

        Raises:
            UsageError: more ranks than samples in a batch.
        """
        before = self._wanted
        wanted = Wanted(
            before.group if group is None else group,
            before.leader if leader is None else leader,
            before.together,
            microbatches or before.microbatches,
        )
        _check(rank, world, self.order.global_batch, wanted.microbatches)
        if self.kind == "batches" and (rank, world) != (self.rank, self.world):
            self._warn(
                "the world changed, but a source of whole batches keeps its own split: samples may"
                " be left out or repeated; give the dataset itself to have none of that"
            )
        self.rank, self.world = rank, world
        self._wanted = wanted
        if wanted[:2] != before[:2]:
            self._home.settle(wanted.group, rank, wanted.leader)
        if self.kind != "batches" and not wanted.microbatches:
            self.weight = _weight(rank, world, self.order.global_batch)
        self._base = self.position
        self._feed.move(self._base, self._place(self.end))

    def _place(self, end: int | None) -> BatchTarget:
        rank, world, stride = self.rank, self.world, self._wanted.microbatches
        reader: Reader = self._reader
        namer = _namer(self.order if self.kind == "map" else None, rank, world)
        if stride:
            together = self._wanted.together
            reader = MicrobatchReader(reader, self.order, stride, end, together)
            namer = _namer_of_steps(f"{rank}of{world}by{together}of", stride, end)
        return BatchTarget(
            rank, world, reader, self._home.store, self._home.group, namer, max(stride, 1)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run; the same on every rank for a map-style dataset."""
        position = self._feed.committed
        state = {"version": STATE_VERSION, "position": position, **self._own}
        if self.kind == "map":
            return state
        before = self._feed.before(position)
        if before is not None and before.note:
            state["before"] = {"note": before.note, "state": before.state}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader was.

        Raises:
            UsageError: it was a loader of another dataset, order or batch size.
        """
        own = {"version": STATE_VERSION, **self._own}
        wrong = [f"{k} {state.get(k)!r} (here {v!r})" for k, v in own.items() if state.get(k) != v]
        if state.get("weights") != own["weights"]:
            raise UsageError(
                "weights= are others than before: a replaced rank, and the function called again, "
                "must make the same. Make them of what does not change in the training"
            )
        if wrong or not isinstance(state.get("position"), int):
            raise UsageError(
                f"this state belongs to another loader: {', '.join(wrong) or 'no position'};"
                " make the loader as it was then, or seek() to a batch of your choice"
            )
        # First, since the thread reads on as soon as it knows the position.
        if before := state.get("before"):
            given = SourceSample("batch", None, before["note"], before["state"])
            self._feed.remember(state["position"], given)
        self.seek(state["position"])

    def close(self, remove: bool = False) -> None:
        """End the thread and let go of the cache. A loader that is dropped is closed as well.

        Args:
            remove: remove the cached batches too, unless another process still uses them. Those of
                a run that is over are removed without it.
        """
        self._home.spent = self._home.spent or remove
        self._closing()


def _close(feed: Prefetcher, home: BatchCache) -> None:
    feed.stop()
    home.leave(remove=False)


def _indices(order: SampleOrder, number: int, rank: int, world: int) -> Indices:
    return order.indices(number, *order.share(number, rank, world))


def _weight(rank: int, world: int, size: int) -> float:
    begin, end = share(size, rank, world)
    return (end - begin) * world / size


def _bounds(weights: Any, shuffle: bool) -> Bounds:
    """Return what samples are drawn by.

    Raises:
        UsageError: these are no weights.
    """
    if not shuffle:
        raise UsageError("weights= draws samples by lot, and shuffle=False asks for their order")
    try:
        numbers = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, of one with a gradient
        raise UsageError(f"weights= takes one number for each sample: {error}") from None
    if numbers.ndim != 1:
        raise UsageError(f"weights= takes one number for each sample, not {numbers.ndim} axes")
    if not np.isfinite(numbers).all() or (numbers < 0).any() or not numbers.any():
        raise UsageError("weights= takes numbers that are not negative, nor all of them 0")
    return bounds_of(numbers)


def _check_whole(**numbers: Any) -> None:
    """Refuse what is no whole number, such as 1000 / 4.

    Raises:
        UsageError: it is none.
    """
    for name, value in numbers.items():
        if value is not None and not hasattr(value, "__index__"):
            raise UsageError(f"{name}={value!r} must be a whole number")


def _check(rank: int, world: int, global_batch: int, microbatches: int) -> None:
    if global_batch < 1 or not 0 <= rank < world or microbatches < 0:
        raise UsageError(f"rank {rank} of {world} has no share of a batch of {global_batch}")
    if world > global_batch and not microbatches:
        raise UsageError(
            f"a batch of {global_batch} samples cannot be shared by {world} ranks:"
            " make global_batch larger"
        )


def _namer(order: SampleOrder | None, rank: int, world: int) -> Callable[[int], str]:
    """Names this rank's share: by its place in the batch where that is known, else by the rank."""
    if order is None:
        return lambda number: f"{rank}of{world}"

    def name(number: int) -> str:
        begin, end = order.share(number, rank, world)
        return f"{begin}-{end}"

    return name


def _namer_of_steps(prefix: str, stride: int, end: int | None) -> Callable[[int], str]:
    """Names this rank's part of a step, by the number of microbatches that the step has."""
    return lambda first: f"{prefix}{stride if end is None else min(stride, end - first)}"
