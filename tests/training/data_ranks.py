"""Processes that share, lose and find again their cached batches; run as a script by the tests.

Torch is loaded once; each rank is a fork of that process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from slurm_resilience.launcher.batch_directory import clean, default_root
from slurm_resilience.training.data import ReplayLoader

fork = multiprocessing.get_context("fork")
SAMPLES, BATCH = 120, 4


def append(path: Path, text: str) -> None:
    """Add a line; whole lines even when many processes write and one is killed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class Filed(Dataset):  # type: ignore[type-arg]
    """Sample i is full of i; writes down who reads it."""

    fingerprint = "filed"

    def __init__(self, home: Path, width: int = 4) -> None:
        self.home = home
        self.width = width

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        append(self.home / "reads", f"{os.getpid()} {index}")
        return index, torch.full((self.width,), index)


def loader_of(home: Path, width: int = 4, **how: Any) -> ReplayLoader:
    how.setdefault("cache", home / "cache")
    return ReplayLoader(Filed(home, width), global_batch=BATCH, **how)


def checked(batch: Any) -> list[int]:
    indices, rows = batch
    assert torch.equal(rows, indices[:, None].expand_as(rows)), "a batch with foreign contents"
    return list(indices.tolist())


def start(body: Callable[..., None], *args: Any) -> Any:
    process = fork.Process(target=body, args=args)
    process.start()
    return process


def member(home: Path, number: int, ready: Any, dies_at: int) -> None:
    loader = loader_of(home, group="tp0", leader=number == 0, prefetch_length=4)
    ready.wait(60)
    given = []
    for batch in loader:
        given.append(checked(batch))
        if number == 2:
            threading.Event().wait(0.05)  # it lags behind, and still finds what it needs
        if number == 0 and len(given) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
    (home / f"given.{number}").write_text(json.dumps(given))
    loader.close()


def group(home: Path, size: int, dies_at: int = 0) -> None:
    """Members that need the same batches; the leader may die after some."""
    ready = fork.Barrier(size)
    processes = [start(member, home, number, ready, dies_at) for number in range(size)]
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes[1:]] == [0] * (size - 1)
    assert processes[0].exitcode == (-signal.SIGKILL if dies_at else 0)


def trainer(home: Path, ahead: int, dies: bool) -> None:
    """Consumes 5 batches and is killed; its successor begins with the sixth."""
    loader = loader_of(home, cache=None, prefetch_length=10 if dies else 0, autocommit=False)
    loader.seek(0 if dies else 5)
    batches = iter(loader)
    pause = threading.Event()
    if dies:
        for _ in range(5):
            checked(next(batches))
            loader.commit()
        checked(next(batches))  # given, not consumed
        while len(lines(home / "reads")) < 16 * BATCH:
            pause.wait(0.01)
        expected = {f"{number:012d}.0-4" for number in range(5, 16)}
        while not expected <= {file.name for file in default_root().glob("batches-*/0*")}:
            pause.wait(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    given = [checked(next(batches)) for _ in range(ahead)]
    loader.seek(3)
    given += [checked(next(batches)) for _ in range(2)]
    order = loader.order
    assert given == [order.indices(k).tolist() for k in (*range(5, 5 + ahead), 3, 4)]
    (home / "successor").write_text(str(os.getpid()))
    os._exit(0)


def kill(home: Path) -> None:
    """A killed process leaves the batches ahead of it and those behind to the next one."""
    assert not default_root().exists()
    for dies in (True, False):
        process = start(trainer, home, 11, dies)
        process.join(60)
        assert process.exitcode == (-signal.SIGKILL if dies else 0)
    assert default_root().is_dir(), "both left without cleaning"
    clean()
    assert not default_root().exists()


def stormy(home: Path) -> None:
    loader = loader_of(home, 50_000, prefetch_length=3, autocommit=False, max_bytes=8 << 20)
    loader.seek(len(lines(home / "consumed")))
    pause = threading.Event()
    for batch in loader:
        found = checked(batch)
        pause.wait(0.01)
        loader.commit()
        append(home / "consumed", json.dumps(found))
    loader.close()


def storm(home: Path) -> None:
    """A process is killed at any moment, again and again."""
    lots = random.Random(3)
    deaths = 0
    while True:
        process = start(stormy, home)
        process.join(lots.uniform(0.02, 0.2) if deaths < 8 else 60)
        if process.exitcode is None:
            process.kill()
            process.join(10)
            deaths += 1
            continue
        assert process.exitcode == 0
        assert deaths > 0
        return


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[2])
    {
        "eight": lambda: group(where, 8),
        "takeover": lambda: group(where, 3, dies_at=6),
        "kill": lambda: kill(where),
        "storm": lambda: storm(where),
    }[sys.argv[1]]()
