"""ReplayLoader in one process: numbers, commits, caches, and every kind of source."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from slurm_resilience.errors import UsageError
from slurm_resilience.training.data import ReplayLoader
from slurm_resilience.training.data.cache import store as batch_files
from slurm_resilience.training.data.cache.codec import pack
from slurm_resilience.training.data.cache.fingerprint import fingerprint
from slurm_resilience.training.data.cache.store import BatchKey, FileStore, Window
from slurm_resilience.training.data.prefetch import Prefetcher
from slurm_resilience.training.data.source import SampleError
from slurm_resilience.training.loaders import Loaders
from slurm_resilience.training.recovery.healer import HealProgress
from slurm_resilience.training.state import rng

pytestmark = pytest.mark.training


class Numbers(Dataset):  # type: ignore[type-arg]
    """Sample i is i; counts what is read; raises where it is told to."""

    fingerprint = "numbers"

    def __init__(self, length: int = 40, broken: int | None = None) -> None:
        self.length = length
        self.broken = broken
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise ValueError("torn page")
        self.reads.append(index)
        return {"i": index, "x": torch.full((4,), float(index))}


def rows(batch: Any) -> list[int]:
    found = batch["i"].tolist()
    assert batch["x"].tolist() == [[float(index)] * 4 for index in found]
    return list(found)


def until(what: Any, seconds: float = 10.0) -> None:
    """Wait for a state."""
    pause = threading.Event()
    for _ in range(int(seconds * 100)):
        if what():
            return
        pause.wait(0.01)
    raise AssertionError(f"not reached within {seconds} s: {what()!r}")


def some(loader: ReplayLoader, count: int) -> list[Any]:
    return list(islice(loader, count))


def cached(root: Path) -> list[Path]:
    return sorted(f for f in root.glob("batches-*/0*") if not f.name.endswith(".tmp"))


def test_alone_it_is_a_loader(tmp_path: Path) -> None:
    loader = ReplayLoader(Numbers(43), global_batch=8, epochs=2, cache=tmp_path / "c")
    assert len(loader) == 10
    epochs: list[list[int]] = [[], []]
    for number, batch in enumerate(loader):
        assert loader.samples.tolist() == rows(batch)
        assert loader.position == loader.next == number + 1
        epochs[number // 5] += rows(batch)
    assert all(len(set(seen)) == 40 for seen in epochs)
    assert epochs[0] != epochs[1]
    assert list(loader) == []
    loader.close()
    assert list(tmp_path.iterdir()) == [], "a finished run leaves nothing"


def test_a_loader_reads_on_once_the_system_has_a_thread_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    loader = ReplayLoader(Numbers(8), global_batch=8, cache=tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refused)
        with pytest.raises(RuntimeError, match="can't start"):
            next(iter(loader))
    assert len(list(loader)) == 1
    loader.close()


def test_a_short_last_batch_is_shared_by_all(tmp_path: Path) -> None:
    seen: list[int] = []
    weights = []
    for rank in range(4):
        loader = ReplayLoader(
            Numbers(10), global_batch=8, rank=rank, world=4, drop_last=False, cache=tmp_path / "c"
        )
        for batch in loader:
            seen += loader.samples.tolist()
            assert len(rows(batch)) == max(1, len(loader.samples))
        weights.append(loader.weight)
    assert sorted(seen) == list(range(10))
    assert sum(weights) == 4
    assert weights == [0.0, 2.0, 0.0, 2.0]


Op = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("fault"), st.integers(0, 3)),
    st.tuples(st.just("world"), st.integers(1, 4)),
    st.tuples(st.just("death"), st.integers(0, 3)),
)


def rewind(loaders: list[ReplayLoader]) -> None:
    for loader in loaders:
        loader.rewind()


@settings(max_examples=50, deadline=None)
@given(st.lists(Op, max_size=10), st.integers(0, 9), st.booleans(), st.sampled_from([5, 8]))
def test_exactly_once(
    tmp_path_factory: pytest.TempPathFactory,
    ops: list[tuple[str, int]],
    seed: int,
    drop_last: bool,
    size: int,
) -> None:
    """Steps, faults, changes of the world and deaths of processes, in any order."""
    root = tmp_path_factory.mktemp("once")

    def make(rank: int, world: int) -> ReplayLoader:
        return ReplayLoader(
            Numbers(43),
            global_batch=size,
            rank=rank,
            world=world,
            seed=seed,
            drop_last=drop_last,
            epochs=2,
            cache=root / "c",
            prefetch_length=3,
            autocommit=False,
        )

    loaders = [make(0, 2), make(1, 2)]
    done: Counter[tuple[int, int]] = Counter()
    per_epoch = loaders[0].order.per_epoch
    end = 2 * per_epoch

    def give(count: int) -> list[tuple[int, int]]:
        """Every rank takes that many batches; (epoch, sample) of each."""
        given = []
        for loader in loaders:
            batches = iter(loader)
            for _ in range(min(count, end - loader.next)):
                number = loader.next
                batch = next(batches)
                samples = loader.samples.tolist()
                assert rows(batch)[: len(samples)] == samples
                batch["x"].zero_()
                given += [(number // per_epoch, sample) for sample in samples]
        return given

    for op, much in [*ops, ("step", end)]:
        if op == "step":
            done.update(give(much))
            for loader in loaders:
                loader.commit()
        elif op == "fault":
            lost = give(much)
            rewind(loaders)
            again = give(much)
            assert again == lost
            rewind(loaders)
        elif op == "world":
            state = loaders[0].state_dict()
            give(1)  # lost: the fault that ended the old world came before its commit
            for loader in loaders[much:]:
                loader.close()
            del loaders[much:]
            for rank, loader in enumerate(loaders):
                loader.reshare(rank, much)
            for rank in range(len(loaders), much):
                loaders.append(make(rank, much))
                loaders[-1].load_state_dict(state)
        else:
            rank = much % len(loaders)
            give(1)
            rewind(loaders)
            state = loaders[0].state_dict()
            loaders[rank].close()
            loaders[rank] = make(rank, len(loaders))
            loaders[rank].load_state_dict(state)
    for loader in loaders:
        assert list(loader) == []
        loader.close()
    assert set(done.values()) <= {1}
    left_out = 43 % size if drop_last else 0
    assert len(done) == 2 * (43 - left_out)


@pytest.mark.parametrize("cache", [True, False])
def test_a_rewind_needs_no_source(tmp_path: Path, cache: bool) -> None:
    data = Numbers(200)
    where = tmp_path / "c" if cache else False
    loader = ReplayLoader(data, global_batch=10, cache=where, prefetch_length=2, autocommit=False)
    batches = iter(loader)
    first = [rows(next(batches)) for _ in range(4)]
    until(lambda: len(data.reads) == 60)
    loader.rewind()
    assert (loader.position, loader.next) == (0, 0)
    assert [rows(next(batches)) for _ in range(4)] == first
    assert len(data.reads) == 60
    loader.commit()
    loader.seek(2)
    assert [rows(next(batches)) for _ in range(2)] == first[2:], "the lookback"
    assert len(data.reads) == 60
    loader.close()


@pytest.mark.parametrize("cache", [True, False])
def test_no_more_than_the_lookback_is_kept(tmp_path: Path, cache: bool) -> None:
    """As many batches were kept behind as are read ahead: five times the memory, by default."""
    data = Numbers(400)
    where = tmp_path / "c" if cache else False
    loader = ReplayLoader(data, global_batch=4, cache=where, prefetch_length=9, lookback_length=1)
    list(some(loader, 20))
    until(lambda: len(data.reads) == 29 * 4)
    kept = {entry.key.number for entry in loader._home.store.entries()}
    assert set(range(20, 29)) <= kept
    # The batch that was read last made room while at most one less was consumed.
    assert min(kept) >= 18
    loader.close()


def test_the_first_commit_ends_the_autocommit(tmp_path: Path) -> None:
    loader = ReplayLoader(Numbers(), global_batch=4, cache=tmp_path / "c")
    batches = iter(loader)
    first = [rows(next(batches)) for _ in range(3)]
    assert loader.state_dict()["position"] == 3
    loader.rewind()
    assert loader.state_dict()["position"] == 0
    assert [rows(next(batches)) for _ in range(3)] == first
    assert loader.state_dict()["position"] == 0
    loader.close()


def test_the_next_process_reads_nothing(tmp_path: Path) -> None:
    """A fresh loader on the cache of a closed one; the same with real deaths is elsewhere."""
    first = Numbers(200)
    loader = ReplayLoader(first, global_batch=10, cache=tmp_path / "c", prefetch_length=5)
    given = [rows(batch) for batch in some(loader, 3)]
    until(lambda: len(first.reads) == 80)
    state = loader.state_dict()
    loader.close()
    second = Numbers(200)
    loader = ReplayLoader(second, global_batch=10, cache=tmp_path / "c", prefetch_length=0)
    loader.load_state_dict(state)
    ahead = [rows(batch) for batch in some(loader, 5)]
    assert second.reads == []
    loader.seek(1)
    assert rows(next(iter(loader))) == given[1], "the lookback"
    assert second.reads == []
    order = loader.order
    assert ahead == [order.indices(number).tolist() for number in range(3, 8)]
    loader.close()


def test_after_a_move_the_window_opens_with_each_batch_that_is_given(tmp_path: Path) -> None:
    source = Numbers(400)
    loader = ReplayLoader(source, global_batch=10, cache=tmp_path / "c", prefetch_length=4)
    some(loader, 1)
    until(lambda: len(source.reads) == 50)
    loader.reshare(0, 2)
    read = []
    for _ in range(6):
        some(loader, 1)
        until(lambda: loader._feed._wanted() is None)
        read.append((len(source.reads) - 50) // 5)
    assert read == [2, 4, 6, 8, 9, 10]
    loader.close()


class Mortal(Dataset):  # type: ignore[type-arg]
    """Its worker is killed once, as for want of memory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_persistent_worker_that_was_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead one was asked three times, and then the training ended."""
    look: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(look, "__defaults__", (0.1,))
    source = DataLoader(Mortal(tmp_path / "killed"), 2, num_workers=1, persistent_workers=True)
    loader = ReplayLoader(source, global_batch=2, cache=False)
    given = []
    with pytest.raises(SampleError, match="exited unexpectedly"):
        given.extend(batch.tolist() for batch in loader)
    given.extend(batch.tolist() for batch in loader)
    assert sorted(chain(*given)) == list(range(8))
    loader.close()


def test_broken_files_are_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = ReplayLoader(Numbers(), global_batch=4, cache=tmp_path / "c", prefetch_length=8)
    given = rows(next(iter(loader)))
    until(lambda: len(cached(tmp_path / "c")) == 9)
    loader.close()
    for turn, file in enumerate(cached(tmp_path / "c")):
        whole = bytearray(file.read_bytes())
        whole[-1] ^= 1
        file.write_bytes(whole[: len(whole) // 2] if turn % 2 else whole)
    again = Numbers()
    loader = ReplayLoader(again, global_batch=4, cache=tmp_path / "c", prefetch_length=8)
    batches = [rows(batch) for batch in loader]
    assert batches[0] == given
    assert sorted(again.reads) == list(range(40))
    assert caplog.text.count("was broken") == 1
    loader.close()


def test_a_broken_file_is_no_batch_where_a_good_one_takes_its_place_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken one was taken for the process's own, unverified: seen once on a busy machine."""
    files = FileStore(tmp_path, 1 << 20, 0.0, lambda text: None)
    key, window = BatchKey(0, "a"), Window(0, 0, 0, 8, "a")
    good = pack(str(key), "batch", {}, ({"x": torch.zeros(4)}, None))
    broken = bytearray(b"".join(good.parts))
    broken[-1] ^= 1
    (tmp_path / str(key)).write_bytes(broken)
    opened = batch_files.mmap.mmap

    def put_meanwhile(*words: Any, **more: Any) -> Any:
        found = opened(*words, **more)
        monkeypatch.undo()
        assert files.put(key, good, window)
        return found

    monkeypatch.setattr(batch_files.mmap, "mmap", put_meanwhile)
    assert files.get(key) is None
    assert files.get(key) is not None


def size(root: Path) -> int:
    """Bytes of the cached batches; a little more where one leaves while they are counted."""
    total = 0
    for file in root.glob("batches-*/*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


class Plain(Dataset):  # type: ignore[type-arg]
    """Tells its contents in its attributes alone."""

    def __init__(self, base: int, root: str = "/data") -> None:
        self.base = base
        self.root = root

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return self.base + index


def test_another_dataset_gets_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same type and length, other contents: settings, arrays, a function's closure, a split."""

    def shifted(by: int) -> Any:
        return lambda samples: torch.tensor([sample + by for sample in samples])

    def first(source: Any, **how: Any) -> Any:
        loader = ReplayLoader(source, global_batch=4, shuffle=False, cache=tmp_path / "c", **how)
        batch = next(iter(loader))
        loader.close()
        return batch[0].tolist() if isinstance(batch, list) else batch.tolist()

    plain = Plain(0)
    assert first(plain) == [0, 1, 2, 3]
    assert first(Plain(100)) == [100, 101, 102, 103]
    assert first(plain, collate_fn=shifted(7)) == [7, 8, 9, 10]
    assert first(plain, collate_fn=shifted(8)) == [8, 9, 10, 11]
    assert first(TensorDataset(torch.arange(8))) == [0, 1, 2, 3]
    assert first(TensorDataset(torch.arange(8) + 1)) == [1, 2, 3, 4]
    assert first(list(range(8))) == [0, 1, 2, 3]
    assert first(list(range(1, 9))) == [1, 2, 3, 4]
    whole = Plain(0)
    assert first(torch.utils.data.Subset(whole, range(20))) == [0, 1, 2, 3]
    assert first(torch.utils.data.Subset(whole, range(20, 40))) == [20, 21, 22, 23]
    assert first(np.arange(8)) == [0, 1, 2, 3]
    assert first(plain, collate_fn=functools.partial(scaled, by=2)) == [0, 2, 4, 6]
    assert first(plain, collate_fn=functools.partial(scaled, by=3)) == [0, 3, 6, 9]
    assert first(Slotted(1)) == [1, 2, 3, 4]
    assert first(Slotted(2)) == [2, 3, 4, 5]
    assert first(deque(range(4))) == [0, 1, 2, 3]  # an object of C
    assert first(deque(range(1, 5))) == [1, 2, 3, 4]
    assert first(plain, collate_fn=by_setting) == [0, 5, 10, 15]
    monkeypatch.setattr(sys.modules[__name__], "SETTING", 6)
    assert first(plain, collate_fn=by_setting) == [0, 6, 12, 18]


SETTING = 5


def by_setting(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * SETTING


def scaled(samples: list[int], by: int) -> torch.Tensor:
    return torch.tensor(samples) * by


class Slotted:
    """A dataset whose setting is in no ``__dict__``."""

    __slots__ = ("__base",)

    def __init__(self, base: int) -> None:
        self.__base = base

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.__base + index


def test_a_program_with_other_arguments_gets_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`for n in 128 512; do srun python train.py --max-len $n; done`, in one job."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--max-len", "128"])
    short = fingerprint(Plain(0))
    assert short == fingerprint(Plain(0))
    monkeypatch.setattr(sys, "argv", ["train.py", "--max-len", "512"])
    assert short != fingerprint(Plain(0))


def test_two_loaders_of_a_training_share_no_batches(tmp_path: Path) -> None:
    """Also where nothing tells their sources apart: each has a name."""
    loaders = Loaders(HealProgress(), cached=True)
    group: Any = SimpleNamespace(rank=0, view=SimpleNamespace(size=1, generation=1))
    told = iter([(1,), (2,)])

    def batch(name: str) -> Any:
        (by,) = next(told)
        how = {"cache": tmp_path / "c", "collate_fn": lambda samples: [s * by for s in samples]}
        how |= {"fingerprint": "the same", "shuffle": False}
        return next(iter(loaders.open(name, range(1, 9), 2, None, group, how)))

    assert [batch("one"), batch("other")] == [[1, 2], [2, 4]]
    loaders.close()


def test_another_dataset_under_a_name_is_refused() -> None:
    """A validation set as long as the training set must not get the training's batches."""
    loaders = Loaders(HealProgress(), cached=False)
    group: Any = SimpleNamespace(rank=0, view=SimpleNamespace(size=1, generation=1))
    loaders.open("data", torch.arange(12.0), 2, None, group, {})
    with pytest.raises(UsageError, match="another loader with name='data'"):
        loaders.open("data", torch.arange(12.0) + 1, 2, None, group, {})
    loaders.close()


def test_the_bound_holds_and_a_giant_goes_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.arange(400_000.0).reshape(400, 1000))
    seen = 0
    loader = ReplayLoader(data, global_batch=4, cache=tmp_path / "c", max_bytes=60_000)
    for _ in loader:
        assert min(size(tmp_path / "c") for _ in range(5)) <= 60_000
        seen += len(loader.samples)
    assert seen == 400
    loader.close()
    assert caplog.text == ""
    loader = ReplayLoader(
        data, global_batch=4, cache=tmp_path / "c", max_bytes=10_000, autocommit=False
    )
    batches = iter(loader)
    first = [next(batches)[0] for _ in range(3)]
    assert caplog.text.count("not cached") == 1
    loader.rewind()
    assert all(torch.equal(next(batches)[0], one) for one in first)
    loader.close()


def test_what_cannot_be_packed_goes_by(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = ReplayLoader(
        list(range(8)), global_batch=2, cache=tmp_path / "c", collate_fn=lambda s: lambda: s
    )
    assert sorted(sample for batch in loader for sample in batch()) == list(range(8))
    assert caplog.text.count("cannot be cached") == 1
    loader.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_exception_comes_where_it_happened(tmp_path: Path, threads: int) -> None:
    data = Numbers(40, broken=13)
    loader = ReplayLoader(
        data, global_batch=4, shuffle=False, cache=tmp_path / "c", threads=threads
    )
    batches = iter(loader)
    assert [rows(next(batches)) for _ in range(3)][2] == [8, 9, 10, 11]
    for _ in range(2):
        with pytest.raises(SampleError, match="sample 13 failed at batch 3: ValueError: torn") as e:
            next(iter(loader))
        assert isinstance(e.value.__cause__, ValueError)
        assert (loader.next, e.value.index, e.value.number) == (3, 13, 3)
    data.broken = None
    assert rows(next(iter(loader))) == [12, 13, 14, 15]
    loader.close()


def test_two_hundred_restarts_leave_nothing(tmp_path: Path) -> None:
    def used() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = used()
    for turn in range(200):
        loader = ReplayLoader(
            Numbers(), global_batch=4, cache=tmp_path / "c", group="g" * (turn % 2)
        )
        batch = next(iter(loader))
        if turn % 3:
            loader.close()
    del loader, batch
    until(lambda: used() <= before)


def test_a_dropped_loader_ends_its_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    loader = ReplayLoader(Numbers(), global_batch=4, cache=tmp_path / "c")
    next(iter(loader))
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    until(lambda: threading.active_count() <= before)


def test_a_closed_loader_says_so(tmp_path: Path) -> None:
    loader = ReplayLoader(Numbers(), global_batch=4, cache=tmp_path / "c")
    next(iter(loader))
    loader.close(remove=True)
    with pytest.raises(UsageError, match="closed"):
        next(iter(loader))
    assert list(tmp_path.iterdir()) == []


def test_states(tmp_path: Path) -> None:
    def make(length: int = 40, **how: Any) -> ReplayLoader:
        how = {"global_batch": 4, "cache": tmp_path / "c", **how}
        return ReplayLoader(Numbers(length), **how)

    state = make().state_dict() | {"position": 5}
    loader = make()
    loader.load_state_dict(state)
    assert loader.position == 5
    assert loader.state_dict() == state
    for other in (make(length=41), make(global_batch=5), make(seed=1), make(shuffle=False)):
        with pytest.raises(UsageError, match="another loader"):
            other.load_state_dict(state)
    with pytest.raises(UsageError, match="another loader: version None"):
        loader.load_state_dict({})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"global_batch": 0}, "no share"),
        ({"global_batch": 4, "rank": 2, "world": 2}, "no share"),
        ({"global_batch": 4, "world": 5}, "cannot be shared by 5"),
        ({"global_batch": 50}, "do not fill a batch of 50"),
        ({"global_batch": 4, "cache": False, "group": "tp"}, "group shares"),
        ({"global_batch": 4, "lookback_length": -1}, "negative"),
    ],
)
def test_wrong_arguments(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ReplayLoader(Numbers(), **{"cache": tmp_path / "c", **how})
    with pytest.raises(UsageError, match="no source"):
        ReplayLoader(3, global_batch=4)


def test_an_opener_is_called_only_to_read(tmp_path: Path) -> None:
    opened = []

    def opener() -> Numbers:
        opened.append(1)
        return Numbers()

    where = tmp_path / "c"
    loader = ReplayLoader(opener, global_batch=4, cache=where, fingerprint="v1")
    first = [rows(batch) for batch in some(loader, 2)]
    until(lambda: len(cached(where)) == 10)
    loader.close()
    assert opened == [1]
    loader = ReplayLoader(opener, global_batch=4, cache=where, fingerprint="v1", prefetch_length=0)
    assert len(loader) == 10
    assert [rows(batch) for batch in some(loader, 2)] == first
    assert opened == [1]
    loader.close()


def test_a_changed_source_behind_an_opener_is_refused(tmp_path: Path) -> None:
    def make(length: int) -> ReplayLoader:
        def opener() -> Numbers:
            return Numbers(length)

        how: dict[str, Any] = {"cache": tmp_path / "c", "fingerprint": "same", "prefetch_length": 0}
        return ReplayLoader(opener, global_batch=4, **how)

    loader = make(40)
    next(iter(loader))
    loader.close()
    loader = make(41)
    batches = iter(loader)
    next(batches)
    with pytest.raises(UsageError, match="has 41 samples, and had 40"):
        next(batches)
    loader.close(remove=True)


def test_another_group_in_another_world(tmp_path: Path) -> None:
    loader = ReplayLoader(Numbers(), global_batch=4, cache=tmp_path / "c", group="tp0", world=2)
    first = rows(next(iter(loader)))
    loader.commit()
    loader.reshare(1, 2, group="tp1", leader=False)
    assert loader.weight == 1
    assert rows(next(iter(loader))) == loader.order.indices(1, 2, 4).tolist()
    assert first == loader.order.indices(0, 0, 2).tolist()
    assert {p.name.rsplit("-", 1)[-1] for p in (tmp_path / "c").iterdir()} == {"tp0", "tp1"}
    loader.reshare(0, 3)
    assert loader.weight == pytest.approx(3 / 4)
    loader.close()


NAMED = """
import sys, torch
from slurm_resilience.training.data.cache.fingerprint import fingerprint
from torch.utils.data import TensorDataset
things = [TensorDataset(torch.arange(9)), {"b", "a", "c"}, print, object()]
things += [lambda x: x in {"q", "w"}]
print(fingerprint(*things, {"k": [1.5, None, (True, b"x")]}))
"""


def test_a_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NAMED)
    path = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    found = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert found[0] == found[1] != ""


class Items(IterableDataset):  # type: ignore[type-arg]
    fingerprint = "items"

    def __init__(self, count: int = 23) -> None:
        self.count = count
        self.starts = 0

    def __iter__(self) -> Iterator[int]:
        self.starts += 1
        return iter(range(self.count))


def test_samples_are_drawn_by_weight(tmp_path: Path) -> None:
    """Two ranks draw together the samples that one draws alone."""
    weights = torch.arange(40) % 4
    whole: list[int] = []
    for batch in ReplayLoader(
        Numbers(), global_batch=8, epochs=20, weights=weights, cache=tmp_path / "a"
    ):
        whole += rows(batch)
    parts = [
        ReplayLoader(
            Numbers(), global_batch=8, epochs=20, weights=weights, rank=rank, world=2,
            cache=tmp_path / "b",
        )
        for rank in range(2)
    ]  # fmt: skip
    shared = [rows(one) for both in zip(*parts, strict=True) for one in both]
    assert list(chain(*shared)) == whole
    counts = Counter(index % 4 for index in whole)
    assert counts[0] == 0
    assert counts[1] < counts[2] < counts[3]
    # Not the same draws again in each epoch.
    assert sorted(whole[:40]) != sorted(whole[40:80])
    for one in parts:
        one.close()


@pytest.mark.parametrize(
    ("source", "how", "words"),
    [
        (Numbers, {"weights": [1.0] * 39}, "has 39 numbers, and takes one for each sample"),
        (lambda: Items(), {"weights": [1.0] * 40}, "this source has no samples"),
        (Numbers, {"weights": [0.0] * 40}, "not negative, nor all of them 0"),
        (Numbers, {"weights": [-1.0] + [1.0] * 39}, "not negative"),
        (Numbers, {"weights": [float("nan")] * 40}, "not negative"),
        (Numbers, {"weights": [[1.0]] * 40}, "not 2 axes"),
        (Numbers, {"weights": ["a"] * 40}, "takes one number for each sample"),
        (Numbers, {"weights": [1.0] * 40, "shuffle": False}, "shuffle=False asks"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, source: Any, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        ReplayLoader(source(), global_batch=4, cache=tmp_path / "c", **how)


def test_a_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    """And one from before there were weights is that of none."""
    state = ReplayLoader(Numbers(), global_batch=4, cache=False).state_dict()
    del state["weights"]
    ReplayLoader(Numbers(), global_batch=4, cache=False).load_state_dict(state)
    weighted = ReplayLoader(Numbers(), global_batch=4, cache=False, weights=[1.0] * 40)
    with pytest.raises(UsageError, match="weights= are others than before"):
        weighted.load_state_dict(state)


@pytest.mark.parametrize("drop_last", [True, False])
def test_items_are_split_over_the_ranks(tmp_path: Path, drop_last: bool) -> None:
    seen: Counter[int] = Counter()
    for rank in range(3):
        loader = ReplayLoader(
            Items(), global_batch=7, rank=rank, world=3, epochs=2, drop_last=drop_last,
            cache=tmp_path / "c",
        )  # fmt: skip
        for batch in loader:
            samples = loader.samples.tolist()
            assert batch.tolist()[: len(samples)] == samples
            seen.update(samples)
        assert loader.next == (6 if drop_last else 8)
        loader.close()
    assert seen == Counter([*range(21 if drop_last else 23)] * 2)


class SlowNumbers(Dataset[int]):
    """The first sample waits until something is done."""

    def __init__(self, does: str) -> None:
        self.began, self.done = threading.Event(), threading.Event()
        self.does = does

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.began.set()
        assert self.done.wait(60)
        return index + (random.randrange(9) if self.does == "draws" else 0)


@pytest.mark.parametrize(("does", "told"), [("draws", True), ("", False)])
def test_a_world_that_ends_while_the_first_batch_is_read_is_no_draw_of_the_dataset(
    caplog: pytest.LogCaptureFixture, does: str, told: bool
) -> None:
    """A rank that was lost again while it read was told so, and a healing sets its numbers."""
    source = SlowNumbers(does)
    loader = ReplayLoader(source, global_batch=4, epochs=1, cache=False)
    batches = iter(loader)
    first = threading.Thread(target=next, args=(batches,), daemon=True)
    first.start()
    assert source.began.wait(60)
    if not does:
        rng.seed(7)
    source.done.set()
    first.join(60)
    loader.close()
    assert ("own random numbers" in caplog.text) == told, caplog.text


@pytest.mark.parametrize("cache", [True, False])
def test_a_dataloader_goes_on_where_it_was(tmp_path: Path, cache: bool) -> None:
    """Its shuffling is a function of the seed, so what is skipped is what was given before."""

    def make() -> ReplayLoader:
        source = DataLoader(Numbers(), batch_size=4, shuffle=True)
        where = tmp_path / "c" if cache else False
        return ReplayLoader(source, global_batch=4, epochs=3, prefetch_length=2, cache=where)

    loader = make()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    whole = [rows(batch) for batch in loader]
    assert torch.equal(torch.random.get_rng_state(), before), "the training's own random numbers"
    assert len(whole) == 30
    assert [sorted(chain(*whole[e * 10 : e * 10 + 10])) for e in range(3)] == [list(range(40))] * 3
    assert whole[:10] != whole[10:20]
    loader.close()
    for stop in (1, 13):
        loader = make()
        given = [rows(batch) for batch in some(loader, stop)]
        state = loader.state_dict()
        loader.close(remove=stop == 13)
        loader = make()
        loader.load_state_dict(state)
        assert given + [rows(batch) for batch in loader] == whole
        loader.close()


class Counting:
    """An iterable whose iterator knows where it is."""

    fingerprint = "counting"

    def __init__(self) -> None:
        self.produced = 0

    def __iter__(self) -> CountingIterator:
        return CountingIterator(self)


class CountingIterator:
    def __init__(self, owner: Counting) -> None:
        self.owner = owner
        self.at = 0

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == 50:
            raise StopIteration
        self.at += 1
        self.owner.produced += 1
        return torch.tensor([self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.at,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.at,) = state["at"]


@pytest.mark.parametrize("cache", ["kept", "lost", "off"])
def test_an_iterators_state_saves_the_skipping(tmp_path: Path, cache: str) -> None:
    where = False if cache == "off" else tmp_path / "c"
    loader = ReplayLoader(Counting(), global_batch=1, cache=where, prefetch_length=3)
    assert [b.item() for b in some(loader, 20)] == list(range(20))
    state = loader.state_dict()
    loader.close(remove=cache == "lost")
    source = Counting()
    loader = ReplayLoader(source, global_batch=1, cache=where, prefetch_length=3)
    loader.load_state_dict(state)
    assert [b.item() for b in loader] == list(range(20, 50))
    assert source.produced <= 30, "nothing was skipped"
    loader.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"global_batch": 8.0}, "global_batch=8.0 must be a whole number"),
        ({"steps": 1000 / 4}, "steps=250.0 must be a whole number"),
        ({"epochs": "2"}, "epochs='2' must be a whole number"),
        ({"prefetch_length": 2.0}, "prefetch_length=2.0 must be a whole number"),
        ({"steps": -1}, "steps=-1 and epochs=1 cannot be negative"),
        ({"epochs": -2}, "steps=None and epochs=-2 cannot be negative"),
    ],
)
def test_numbers_that_make_no_run_are_refused(wrong: dict[str, Any], words: str) -> None:
    """One waited for ever, others trained nothing and ended well, or failed in the middle."""
    with pytest.raises(UsageError, match=re.escape(words)):
        ReplayLoader(Numbers(), cache=False, **({"global_batch": 4} | wrong))


def test_a_whole_number_may_be_numpys() -> None:
    loader = ReplayLoader(Numbers(), global_batch=np.int64(4), steps=np.int32(3), cache=False)  # type: ignore[arg-type]
    assert len(list(loader)) == 3
    loader.close()


class Placed(IterableDataset):  # type: ignore[type-arg]
    """A stream that keeps its place in itself: iterated anew, it goes on from there."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 60:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_a_stream_that_keeps_its_place_is_brought_back_to_it(taken: int, world: int) -> None:
    """Batches were read ahead when the world ended. It went on where that had come to: samples were
    lost, others came twice, and the ranks trained on shares of different batches."""
    loader = ReplayLoader(
        Placed(), global_batch=6, world=3, epochs=2, cache=False, prefetch_length=4
    )
    loader.commit()
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    loader.commit()
    next(batches)
    next(batches)
    loader.rewind()
    loader.reshare(0, world)
    got = [batch.tolist() for batch in loader]
    share = 6 // world
    firsts = [*range(taken * 6, 60, 6), *range(0, 60, 6)]
    assert got == [list(range(first, first + share)) for first in firsts]
    loader.close()


def test_a_position_is_not_read_before_its_stream_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread began the stream anew meanwhile."""
    loader = ReplayLoader(Placed(), global_batch=6, cache=False)
    loader.commit()
    next(iter(loader))
    loader.commit()
    state = loader.state_dict()
    loader.close()
    other = ReplayLoader(Placed(), global_batch=6, cache=False)
    known = []
    move = Prefetcher.move

    def noted(self: Prefetcher, number: int, place: Any = None) -> None:
        known.append(self.before(number) is not None)
        move(self, number, place)

    monkeypatch.setattr(Prefetcher, "move", noted)
    other.load_state_dict(state)
    assert known == [True]
    other.close()


def test_a_generator_is_given_once(tmp_path: Path) -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield from torch.arange(6).split(1)

    loader = ReplayLoader(
        batches(), global_batch=1, epochs=None, cache=tmp_path / "c", autocommit=False
    )
    both = []
    for _ in range(2):
        both.append([batch.item() for batch in loader])
        loader.rewind()
    assert both == [list(range(6))] * 2, "the second time from the cache"
    loader.close()


def test_an_empty_stream_is_no_endless_loop(tmp_path: Path) -> None:
    loader = ReplayLoader(Items(0), global_batch=1, epochs=None, cache=tmp_path / "c")
    with pytest.raises(UsageError, match="empty"):
        next(iter(loader))
    loader.close()


def test_a_name_is_of_one_loader_and_a_healed_position_moves_it() -> None:
    progress = HealProgress()
    loaders = Loaders(progress, cached=False)
    group: Any = SimpleNamespace(rank=0, view=SimpleNamespace(size=1, generation=1))
    loader = loaders.open("data", torch.arange(12.0), 2, None, group, {})
    with pytest.raises(UsageError, match="another loader with name='data'"):
        loaders.open("data", torch.arange(8.0), 2, None, group, {})
    batches = list(loader)
    loader.seek(4)
    progress.positions["data"] = loader.state_dict()
    loader.seek(0)
    loaders.healed()
    assert [b.tolist() for b in loader] == [b.tolist() for b in batches[4:]]
    loaders.close()


def test_a_run_that_is_over_is_told_to_who_loops_over_it_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaders = Loaders(HealProgress(), cached=False)

    def loop(generation: int) -> int:
        view = SimpleNamespace(size=1, generation=generation)
        group: Any = SimpleNamespace(rank=0, view=view)
        given = len(list(loaders.open("data", torch.arange(12.0), 2, None, group, {})))
        loaders.commit()
        return given

    # A fault after the last step, or a newcomer then, finds nothing left to do.
    assert [loop(1), loop(2)] == [6, 0]
    assert caplog.text == ""
    assert [loop(2), loop(2)] == [0, 0]
    assert caplog.text.count("its 6 batches come once in a training, and none is left. Give") == 1
    assert "seek" not in caplog.text
    loaders.close()


@pytest.mark.parametrize(
    ("taken", "is_told"),
    [
        ((2, 1, 1), True),
        ((4, 1, 1), True),
        ((1, 1, 1), False),
        ((3, 3, 3), False),
        ((4, 2), False),
        ((4, 4, 1), False),
    ],
    ids=[
        "read ahead",
        "three read ahead",
        "one a step",
        "accumulated",
        "grows",
        "the rest at the end",
    ],
)
def test_a_program_that_reads_ahead_is_told_after_two_updates(
    caplog: pytest.LogCaptureFixture, taken: tuple[int, ...], is_told: bool
) -> None:
    """Its batch is counted to the update before its own: a fault between them leaves it out."""
    loaders = Loaders(HealProgress(), cached=False)
    for generation in (1, 2):
        view = SimpleNamespace(size=1, generation=generation)
        group: Any = SimpleNamespace(rank=0, view=view)
        loader = iter(loaders.open("data", torch.arange(40.0), 2, None, group, {}))
        for count in taken:
            for _ in range(count):
                next(loader)
            loaders.commit()
    assert caplog.text.count("something reads ahead") == is_told
    loaders.close()


def test_a_healed_position_is_not_taken_for_reading_ahead(caplog: pytest.LogCaptureFixture) -> None:
    progress = HealProgress()
    loaders = Loaders(progress, cached=False)
    view = SimpleNamespace(size=1, generation=1)
    group: Any = SimpleNamespace(rank=0, view=view)
    loader = loaders.open("data", torch.arange(40.0), 2, None, group, {})
    loader.seek(1)
    progress.positions["data"] = loader.state_dict()
    loader.seek(0)
    loaders.healed()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        loaders.commit()
    assert "reads ahead" not in caplog.text
    loaders.close()
