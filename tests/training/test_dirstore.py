"""DirStore against torch's own TCPStore, and used by several processes at once."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from slurm_resilience.training.process_group import logfile  # noqa: E402
from slurm_resilience.training.process_group.dirstore import DirStore  # noqa: E402
from slurm_resilience.training.process_group.records import Op, Record, encode  # noqa: E402

pytestmark = pytest.mark.training

Open = Callable[..., DirStore]
SECOND = timedelta(seconds=1)
NOW = timedelta(milliseconds=5)


@pytest.fixture(params=["local", "shared"])
def opened(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Open]:
    """Opens stores; `shared`: as on a file system of several machines (file lock, polls)."""
    if request.param == "shared":
        monkeypatch.setattr(logfile, "_LOCAL", frozenset())
    stores: list[DirStore] = []

    def make(name: str = "store", timeout: timedelta = 20 * SECOND) -> DirStore:
        stores.append(DirStore(tmp_path / name, timeout))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


NUMBERS = itertools.count()
KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["", "0", "7", "-3", "x"])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, st.integers(-5, 5)),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, max_size=2)),
    st.tuples(st.just("multi_set"), st.just(["a", "c"]), st.lists(VALUES, min_size=2, max_size=2)),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("multi_get"), st.lists(KEYS, min_size=1, max_size=2)),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(calls=st.lists(CALLS, max_size=12))
def test_it_answers_as_tcpstore_does(opened: Open, tcp: Any, calls: list[tuple[Any, ...]]) -> None:
    number = next(NUMBERS)
    ours, theirs = opened(f"{number}"), dist.PrefixStore(f"{number}", tcp)
    for name, *arguments in calls:
        if name in ("get", "multi_get"):
            keys = arguments[0] if name == "multi_get" else [arguments[0]]
            if not theirs.check(keys):
                continue  # both would wait
        if name == "add" and theirs.check([arguments[0]]):
            try:
                int(theirs.get(arguments[0]))
            except ValueError:
                with pytest.raises(dist.DistStoreError, match="no number"):
                    ours.add(*arguments)
                continue
        assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments), name
    present = [key for key in ("a", "b", "c") if theirs.check([key])]
    assert sorted(ours.list_keys()) == present
    assert ours.num_keys() == len(present)
    again = opened(f"{number}")
    assert again.multi_get(present) == theirs.multi_get(present)


@pytest.fixture(scope="module")
def tcp() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_waiting_get_returns_when_another_sets(opened: Open) -> None:
    reader, writer = opened(), opened()
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(reader.get("k")))
    thread.start()
    writer.set("k", b"\x00\xff")
    thread.join(20)
    assert found == [b"\x00\xff"]


def test_its_time_being_over_it_raises_what_tcpstore_raises(opened: Open) -> None:
    store = opened(timeout=NOW)
    with pytest.raises(dist.DistStoreError, match="'gone'"):
        store.get("gone")
    with pytest.raises(dist.DistStoreError, match="'gone'"):
        store.wait(["gone"], NOW)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_cancel_ends_every_call(opened: Open) -> None:
    store = opened()
    errors: list[Exception] = []
    began = threading.Barrier(3)

    def wait() -> None:
        began.wait(20)
        try:
            store.wait(["never"])
        except dist.DistStoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    began.wait(20)
    store.cancel()
    for thread in threads:
        thread.join(10)
    assert ["cancelled" in str(error) for error in errors] == [True, True]
    with pytest.raises(dist.DistStoreError, match="cancelled"):
        store.set("k", "v")


def test_half_a_record_of_a_killed_writer_stops_nobody(opened: Open, tmp_path: Path) -> None:
    store, reader = opened(), opened()
    store.set("before", "1")
    dead = encode(Record(b"deadbeef", 0, (Op("set", "dead", b"x" * 5000),)))
    with (tmp_path / "store" / "log").open("ab") as log:
        log.write(dead[:4096])
    store.set("after", "2")
    assert store.add("count", 3) == 3
    assert reader.multi_get(["before", "after", "count"]) == [b"1", b"2", b"3"]
    assert not reader.check(["dead"])


def test_closing_gives_everything_back(tmp_path: Path) -> None:
    def use(number: int) -> None:
        store = DirStore(tmp_path / f"{number}")
        store.set("k", "v")
        store.close()

    use(0)  # the process's inotify instance stays
    gc.collect()  # what earlier tests left
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(1, 50):
        use(number)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_its_directory_is_the_owners_alone(tmp_path: Path) -> None:
    store = DirStore(tmp_path / "new" / "store")
    assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700
    store.close()


WORKER = """
import gc, sys
from datetime import timedelta
import torch, torch.distributed as dist
from slurm_resilience.training.process_group import logfile
from slurm_resilience.training.process_group.dirstore import DirStore

path, kind, rank, size, rounds = *sys.argv[1:3], *map(int, sys.argv[3:])
if kind == "shared":
    logfile._LOCAL = frozenset()
store = DirStore(path, timedelta(seconds=60))
print(*(store.add("sum", 1) for _ in range(rounds)))
for n in range(rounds):
    now, done = store.compare_set("swaps", "", "0"), False
    while not done:
        # No other process writes this value: a process that finds it put it there.
        want = b"%d of %d.%d" % (int(now.split()[0]) + 1, rank, n)
        now = store.compare_set("swaps", now, want)
        done = now == want
store.close()

# torch keeps the store by itself: no object here holds it.
dist.init_process_group("gloo", store=DirStore(path + "/group"), rank=rank, world_size=size)
gc.collect()
pair = dist.new_group([0, size - 1])
one, two = torch.ones(1), torch.ones(1)
dist.all_reduce(one)
if rank in (0, size - 1):
    dist.all_reduce(two, group=pair)
print(int(one), int(two))
"""


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_processes_count_swap_and_form_groups(tmp_path: Path, kind: str) -> None:
    size, rounds = 3, 40
    path = str(tmp_path / "store")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, path, kind, *map(str, (rank, size, rounds))],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        said = [worker.communicate(timeout=60)[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    counted = sorted(int(number) for lines in said for number in lines[0].split())
    assert counted == list(range(1, size * rounds + 1))
    store = DirStore(path)
    assert store.get("swaps").split()[0] == b"%d" % (size * rounds)
    store.close()
    assert [lines[1] for lines in said] == ["3 2", "3 1", "3 2"]


def test_a_stopped_writer_holds_nobody_up(tmp_path: Path) -> None:
    endless = f"""
from slurm_resilience.training.process_group.dirstore import DirStore
store = DirStore({str(tmp_path / "store")!r})
while True:
    store.add("theirs", 1)
"""
    writer = subprocess.Popen([sys.executable, "-c", endless])
    store = DirStore(tmp_path / "store", 20 * SECOND)
    try:
        store.wait(["theirs"], 60 * SECOND)
        for number in range(30):
            writer.send_signal(signal.SIGSTOP)
            assert store.add("ours", 1) == number + 1
            at = store.add("theirs", 0)
            writer.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + 20
            while store.add("theirs", 0) <= at:
                assert time.monotonic() < deadline, "the writer does not go on"
    finally:
        writer.kill()
        writer.wait(10)
        store.close()
