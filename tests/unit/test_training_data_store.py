"""Packing and keeping batches: what goes in comes out, and nothing broken ever does."""

from __future__ import annotations

import math
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
np = pytest.importorskip("numpy", reason="numpy is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from slurm_resilience.training.data.cache.codec import pack, unpack  # noqa: E402
from slurm_resilience.training.data.cache.store import (  # noqa: E402
    BatchEntry,
    BatchKey,
    FileStore,
    MemoryStore,
    Window,
    victims,
)

Point = namedtuple("Point", "x y")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
WINDOW = Window(keep=0, committed=0, next=0, end=10, share="0-4")


def through(batch: Any) -> Any:
    packed = pack("k", "batch", {}, batch)
    data = bytearray(b"".join(packed.parts))
    assert len(data) == packed.size
    read = unpack("k", data)
    assert read is not None
    return read.batch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)], ids=str)
def test_tensors_come_back_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    back = through(tensor)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    flat = [t.reshape(-1).view(torch.uint8).tolist() for t in (back, tensor)]
    assert flat[0] == flat[1]


def test_layouts_are_kept() -> None:
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = through(images)
    assert back.stride() == images.stride()
    assert torch.equal(back, images)
    for odd in (torch.rand(6, 4)[::2], torch.rand(3).expand(4, 3), torch.rand(4, 6).t()):
        assert torch.equal(through(odd), odd)


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
trees = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.none()), inner),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(trees)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    back = through(tree)
    assert back == tree
    assert repr(back) == repr(tree)


def test_the_rest_comes_back_too() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    batch = {
        "a": np.arange(6, dtype=">i2").reshape(2, 3),
        "times": np.array(["2024-01-01"], dtype="M8[s]"),
        "words": np.array(["x", None], dtype=object),
        "record": np.zeros(2, dtype=[("x", "f4"), ("y", "i8")]),
        "scalar": np.float32(0.5),
        "nan": math.nan,
        "sparse": torch.eye(3).to_sparse(),
        "parameter": parameter,
        "lone": "\ud800",
        "set": {1, 2},
        "zero": np.array(3.0),
    }
    back = through(batch)
    assert math.isnan(back["nan"])
    assert back["a"].dtype == batch["a"].dtype
    assert back["record"].dtype == batch["record"].dtype
    assert back["zero"].shape == ()
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert isinstance(back["parameter"], torch.nn.Parameter)
    for name in ("a", "times", "words", "record"):
        assert back[name].tolist() == batch[name].tolist()
    assert back["lone"] == "\ud800"
    assert back["set"] == {1, 2}


@settings(deadline=None)
@given(st.data())
def test_a_changed_file_is_no_batch(data: st.DataObject) -> None:
    packed = pack("k", "batch", {"n": 1}, {"x": torch.arange(40), "y": "text"})
    whole = b"".join(packed.parts)
    assert unpack("k", bytearray(whole)) is not None
    assert unpack("other", bytearray(whole)) is None
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert unpack("k", bytearray(whole[:cut])) is None
    flipped = bytearray(whole)
    flipped[cut] ^= data.draw(st.integers(1, 255))
    read = unpack("k", flipped)
    # A byte between header and data is covered by nothing, for nothing reads it.
    assert read is None or torch.equal(read.batch["x"], torch.arange(40))


sizes = st.integers(1, 100)
entries = st.lists(
    st.builds(
        BatchEntry, st.builds(BatchKey, st.integers(0, 20), st.sampled_from(["0-4", "4-8"])), sizes
    ),
    unique_by=lambda entry: entry.key,
)


@settings(deadline=None)
@given(entries, sizes, st.integers(0, 500), st.integers(0, 9), st.integers(0, 3), st.integers(0, 9))
def test_who_leaves(
    kept: list[BatchEntry], size: int, room: int, committed: int, given_out: int, ahead: int
) -> None:
    window = Window(committed - 2, committed, committed + given_out, committed + 10, "0-4")
    new = BatchEntry(BatchKey(window.next + ahead, "0-4"), size)
    leaving = victims(kept, new, room, window)
    if leaving is None:
        if ahead == 0:
            assert size > room, "the batch that the training waits for fits if it fits at all"
        return
    staying = [e for e in kept if e not in leaving and e.key != new.key]
    assert sum(e.size for e in staying) + size <= room
    assert all(e.key.number >= window.keep for e in staying)
    precious = [
        e for e in leaving if e.key.share == "0-4" and window.committed <= e.key.number < window.end
    ]
    assert not precious or ahead == 0


def store_at(path: Path, max_bytes: int = 1 << 20) -> FileStore:
    path.mkdir(mode=0o700, exist_ok=True)
    return FileStore(path, max_bytes, 0.0, lambda text: None)


def packed(key: BatchKey, value: int) -> Any:
    return pack(str(key), "batch", {}, torch.full((100,), value))


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_what_comes_out_is_the_readers_own(tmp_path: Path, kind: str) -> None:
    store = store_at(tmp_path / "c") if kind == "file" else MemoryStore(1 << 20)
    key = BatchKey(0, "0-4")
    assert not store.has(key)
    assert store.get(key) is None
    assert store.put(key, packed(key, 5), WINDOW)
    assert store.has(key)
    first = store.get(key)
    assert first is not None
    first.batch.zero_()
    second = store.get(key)
    assert second is not None
    assert second.batch.tolist() == [5] * 100
    assert store.get(BatchKey(0, "4-8")) is None
    assert store.get(BatchKey(1, "0-4")) is None


def test_a_batch_stays_readable_after_its_file_is_gone(tmp_path: Path) -> None:
    store = store_at(tmp_path / "c")
    key = BatchKey(0, "0-4")
    store.put(key, packed(key, 5), WINDOW)
    read = store.get(key)
    assert read is not None
    (tmp_path / "c" / str(key)).unlink()
    assert read.batch.sum() == 500


def test_the_bound_holds(tmp_path: Path) -> None:
    store = store_at(tmp_path / "c", max_bytes=4000)
    for number in range(50):
        key = BatchKey(number, "0-4")
        window = Window(number - 2, number, number, number + 10, "0-4")
        assert store.put(key, packed(key, number), window)
        assert sum(f.stat().st_size for f in (tmp_path / "c").iterdir()) <= 4000
        assert store.has(key)
    big = pack("000000000050.0-4", "batch", {}, torch.zeros(4000))
    assert not store.put(BatchKey(50, "0-4"), big, WINDOW)


def test_unfinished_and_foreign_files_are_never_used(tmp_path: Path) -> None:
    store = store_at(tmp_path / "c")
    key = BatchKey(3, "0-4")
    whole = b"".join(packed(key, 7).parts)
    left = tmp_path / "c" / f"{key}.123.abc.tmp"
    left.write_bytes(whole[:50])
    assert not store.has(key)
    assert store.entries() == []
    assert not left.exists(), "its writer is dead"
    for broken in (b"", whole[:50], whole[:-1], bytes(len(whole)), b"x" * len(whole)):
        (tmp_path / "c" / str(key)).write_bytes(broken)
        assert store.get(key) is None
        assert not store.has(key)
    (tmp_path / "elsewhere").write_bytes(whole)
    (tmp_path / "c" / str(key)).symlink_to(tmp_path / "elsewhere")
    assert store.get(key) is None


def test_a_file_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(tmp_path / "c")
    key = BatchKey(0, "0-4")
    store.put(key, packed(key, 5), WINDOW)
    assert store.get(key) is not None
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert store.get(key) is None


def test_no_error_of_the_cache_is_one_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    store = FileStore(tmp_path, 1000, 0.0, told.append)

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "_write", broken)
    key = BatchKey(1, "0-1")
    assert not store.put(key, packed(key, 5), WINDOW)
    assert told == [f"{tmp_path}: a batch could not be kept: Input/output error"]
