#!/usr/bin/env python3
"""Restoring a model and its AdamW state from a peer's memory, beside a bare send of as many bytes.

Over gloo on loopback, one process per rank. Both are timed in turn in the same run, so a busy
machine slows both.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

from slurm_resilience.mesh.model import Member, Peer, PeerStatus, View
from slurm_resilience.training.state import Tracked, plan, transfer

RUNS = 5
BLOCKS, WIDTH = 10, 512
"""About 400 MB: 10 transformer blocks of 3.15 M parameters, float32, and twice that for AdamW."""


def build(trained: bool) -> Tracked:
    """Build a model with tensors of 2 KB to 8 MB, and its optimizer, stepped once if trained."""
    block = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH)
    model = nn.Sequential(
        nn.Embedding(3000, WIDTH),
        nn.Sequential(*(copy.deepcopy(block) for _ in range(BLOCKS))),
        nn.Linear(WIDTH, 100),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    if trained:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return Tracked({"model": model, "optimizer": optimizer})


def _rank(rank: int, world: int, store: str, answer: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    held = PeerStatus(generation=1, step=1, position=0)
    members = tuple(
        Member(Peer(str(seat), seat, node=f"n{seat}"), PeerStatus() if seat == 0 else held)
        for seat in range(world)
    )
    view = View(2, members)
    healing = plan(view)
    tracked = build(trained=rank > 0)
    size = torch.tensor([tracked.capture().descriptor.total])
    dist.broadcast(size, 1)
    whole = torch.ones(int(size) // 4)
    times: dict[str, list[float]] = {"bare": [], "restore": [], "first": [], "digest": []}
    for run in range(RUNS + 1):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 1:
            dist.send(whole, 0)
        elif rank == 0:
            dist.recv(whole, 1)
        if run:
            times["bare"].append(time.perf_counter() - begin)
        dist.barrier()
        begin = time.perf_counter()
        transfer(healing, view, rank, tracked, dist.group.WORLD)
        # The first time also makes the joiner's optimizer state (the kernel hands out its pages).
        times["restore" if run else "first"].append(time.perf_counter() - begin)
    dist.barrier()
    if rank == 0:
        for _ in range(RUNS):
            begin = time.perf_counter()
            tracked.digest()
            times["digest"].append(time.perf_counter() - begin)
        answer.put((int(size), times))
    dist.barrier()
    dist.destroy_process_group()


def _measure(world: int) -> tuple[int, dict[str, list[float]]]:
    context = mp.get_context("spawn")
    answer = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(_rank, (world, store, answer), nprocs=world)
    return answer.get()


def run() -> dict[str, float]:
    """Measure, print a table, and return GB/s (1e9 bytes), medians of five."""
    found: dict[str, float] = {}
    size, times = _measure(2)
    found["bare_send_gbps"] = size / statistics.median(times["bare"]) / 1e9
    found["peer_restore_gbps"] = size / statistics.median(times["restore"]) / 1e9
    found["peer_restore_first_gbps"] = size / times["first"][0] / 1e9
    # Pair by pair, because the two of a pair saw the same load.
    pairs = zip(times["bare"], times["restore"], strict=True)
    found["peer_restore_share"] = statistics.median(bare / ours for bare, ours in pairs)
    found["digest_gbps"] = size / statistics.median(times["digest"]) / 1e9
    _, times = _measure(3)
    found["peer_restore_two_senders_gbps"] = size / statistics.median(times["restore"]) / 1e9
    table = Table(title=f"{size / 1e6:.0f} MB of state over gloo", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in found.items():
        text = f"{value:.0%}" if name.endswith("share") else f"{value:.2f} GB/s"
        table.add_row(name.removesuffix("_gbps").replace("_", " "), text)
    Console(highlight=False, file=sys.stderr).print(table)
    return found


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(json_file: Path | None) -> None:
    """Time the restore from a peer."""
    found = run()
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
