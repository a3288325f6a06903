#!/usr/bin/env python3
"""Seconds to the first batch of a process that was killed and replaced: with its cache, without.

The dataset takes 2 s to open and 5 ms a sample; a batch has 32 samples of 4 KiB. The process is
killed with batches ahead of it. Its successor (torch loaded already) begins where it stood: once on
the cache that was left behind, once on a cold one, which is what rebuilding the pipeline costs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch.utils.data import Dataset

from slurm_resilience.training.data import ReplayLoader

OPEN, SAMPLE, BATCH, GIVEN, AHEAD = 2.0, 0.005, 32, 3, 10

_pause = threading.Event()


class Slow(Dataset):  # type: ignore[type-arg]
    """Opens and reads as slowly as a file on a busy file server."""

    def __init__(self) -> None:
        _pause.wait(OPEN)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        _pause.wait(SAMPLE)
        return torch.full((1024,), float(index))


def _loader(cache: Path) -> ReplayLoader:
    return ReplayLoader(Slow, global_batch=BATCH, cache=cache, prefetch_length=AHEAD)


def _killed(cache: Path) -> None:
    """Take some batches, wait until those ahead lie in the cache, and die."""
    batches = iter(_loader(cache))
    for _ in range(GIVEN):
        next(batches)
    while not list(cache.glob(f"batches-*/{GIVEN + AHEAD - 1:012d}.*")):
        _pause.wait(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def _successor(cache: Path, say: Any) -> None:
    """Tell the time from making the loader to having the batch that the dead process would have
    had."""
    began = time.perf_counter()
    loader = _loader(cache)
    loader.seek(GIVEN)
    batch = next(iter(loader))
    seconds = time.perf_counter() - began
    assert batch[:, 0].tolist() == loader.samples.tolist()
    say.send(seconds)
    os._exit(0)


def _first_batch(cache: Path) -> float:
    fork = multiprocessing.get_context("fork")
    hear, say = fork.Pipe(duplex=False)
    process = fork.Process(target=_successor, args=(cache, say))
    process.start()
    seconds: float = hear.recv()
    process.join(30)
    return seconds


def measure(runs: int = 5) -> dict[str, float]:
    """Medians over ``runs``, in seconds: ``first_batch_after_restart_s``, ``…_rebuilt_s``."""
    fork = multiprocessing.get_context("fork")
    restarted, rebuilt = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
            warm = Path(home) / "warm"
            process = fork.Process(target=_killed, args=(warm,))
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL
            restarted.append(_first_batch(warm))
            rebuilt.append(_first_batch(Path(home) / "cold"))
    return {
        "first_batch_after_restart_s": statistics.median(restarted),
        "first_batch_rebuilt_s": statistics.median(rebuilt),
    }


@click.command()
@click.option("--runs", default=5, show_default=True, help="Deaths.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(runs: int, json_file: Path | None) -> None:
    """Time the first batch after a restart."""
    found = measure(runs)
    for name, seconds in found.items():
        click.echo(f"{name:28} {seconds:8.4f}")
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
