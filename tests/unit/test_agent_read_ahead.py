"""Files are read ahead on an idle node: into the page cache, within limits, while no job runs."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slurm_resilience.agent.read_ahead import MEMORY_SHARE, ReadAhead, ReadFiles
from slurm_resilience.clock import SystemClock
from slurm_resilience.config import parse
from slurm_resilience.errors import ConfigError

SIZE = 24 << 20


def reader(*patterns: str, is_busy: Callable[[], bool] = lambda: False) -> ReadAhead:
    return ReadAhead(patterns, is_busy, SystemClock(), threading.Event())


def share_in_memory(path: Path) -> float:
    """Return the share of a file's pages in the page cache, by mincore."""
    library = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        begin = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(begin))
        assert library.mincore(address, ctypes.c_size_t(size), pages) == 0
        del begin
        return sum(page & 1 for page in pages) / len(pages)


def test_files_are_in_memory_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "libtorch.so"
    with path.open("wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = share_in_memory(path)
    if before > 0.1:
        pytest.skip("needs a disk: this file system keeps its files in memory")
    assert reader(f"{tmp_path}/**/*.so").read() == ReadFiles(1, SIZE, is_whole=True)
    until = time.monotonic() + 10
    while share_in_memory(path) < 1 and time.monotonic() < until:
        time.sleep(0.05)  # the kernel reads behind our back
    assert share_in_memory(path) == 1


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"12345")
    assert reader(f"{tmp_path}/*").read() == ReadFiles(1, 5, is_whole=True)


def test_a_job_that_begins_ends_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    ahead = reader(f"{tmp_path}/*", is_busy=lambda: True)
    assert ahead.read() == ReadFiles(0, 0, is_whole=False)


def test_no_more_than_a_share_of_the_memory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=int(100 / MEMORY_SHARE))
    )
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(bytes(60))
    assert reader(f"{tmp_path}/*").read() == ReadFiles(2, 100, is_whole=False)


class _StopAfter(SystemClock):
    """Lets so many rounds pass."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_busy_node_reads_nothing_and_the_same_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    busy = iter((True, *(False,) * 10))
    ahead = ReadAhead(
        [f"{tmp_path}/nothing*"], lambda: next(busy), _StopAfter(3), threading.Event()
    )
    ahead.run()
    assert [record.getMessage() for record in caplog.records] == [
        f"agent.read_ahead: no file can be read by {tmp_path}/nothing*"
    ]


def test_a_job_that_begins_at_once_is_no_lack_of_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    busy = iter((False, True))
    ahead = ReadAhead([f"{tmp_path}/*"], lambda: next(busy), _StopAfter(1), threading.Event())
    ahead.run()
    assert not caplog.records


def test_a_path_must_be_absolute() -> None:
    with pytest.raises(ConfigError, match=r"agent\.read_ahead must be an absolute path"):
        parse('[agent]\nread_ahead = ["torch/lib/*"]\n', "sres.toml")
