#!/usr/bin/env python3
"""The cost of a step whose result has the same bits on any number of ranks.

Over gloo on loopback, one process per rank, one thread each. Three ways to add up gradients are
timed in turn in the same run, so a busy machine slows all: DDP (all-reduce during the last
backward), one all-reduce after it, and the tree (`same_bits`). The model is an MLP of 1.6 million
parameters; 16 microbatches of 8 samples make a step.

Then the size of a living training changes: one of four ranks is lost, and another joins; beside it
the same loss where all ranks start again from a checkpoint, with warm processes.

Last, an elastic job on real Slurm (needs root): a node becomes free, and one turns sick.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import elastic_changes
import elastic_lab
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

from slurm_resilience.errors import SresError
from slurm_resilience.training.data import ReplayLoader
from slurm_resilience.training.elastic.microbatches import MicrobatchSteps

SIZE, COUNT, WIDTH = 8, 16, 1024
WARM_STEPS = 2
WAYS = ("ddp", "all_reduce", "same_bits")


class Waves(torch.utils.data.Dataset[Any]):
    """Sample i: 256 numbers drawn from i, the sine of their sum, and i."""

    fingerprint = "waves"

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(256, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().view(1), index


def build() -> nn.Module:
    """Build the same model on each rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 1))


class Way:
    """A training that adds up gradients in one way, of which steps can be timed."""

    def __init__(self, way: str, rank: int, world: int) -> None:
        self.model = build()
        self.net = nn.parallel.DistributedDataParallel(self.model) if way == "ddp" else self.model
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.loader = ReplayLoader(
            Waves(), global_batch=SIZE, rank=rank, world=world, microbatches=COUNT, cache=False
        )
        self.batches = iter(self.loader)
        self.steps = MicrobatchSteps(
            [self.net],
            self.loader,
            size=SIZE,
            length=COUNT,
            full=COUNT,
            same_bits=way == "same_bits",
            rate="constant",
            device=torch.device("cpu"),
            waits=lambda: None,
        )
        self.seen: list[int] = []

    def step(self) -> float:
        """Make a step; return its seconds, without the wait for data and for other ranks."""
        first, batches = self.loader.next, next(self.batches)
        self.seen += self.loader.samples.tolist()
        dist.barrier()
        begin = time.perf_counter()
        step = self.steps.step(first, batches)
        for x, y, _ in step:
            step.backward(nn.functional.mse_loss(self.net(x), y))
        self.opt.step()
        return time.perf_counter() - begin

    def parameters(self) -> torch.Tensor:
        """Return all parameters in one flat tensor."""
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def _rank(rank: int, world: int, steps: int, store: str, answer: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    ways = {name: Way(name, rank, world) for name in WAYS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(WARM_STEPS + steps):
        for name, way in ways.items():
            took = way.step()
            if number >= WARM_STEPS:
                seconds[name].append(took)
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, ways["same_bits"].seen)
    if rank == 0:
        parameters = {name: way.parameters().numpy() for name, way in ways.items()}
        answer.put((seconds, parameters, [index for of in seen for index in of]))
    dist.barrier()
    # DDP's wrapper goes before the group: see scripts/templates/train_ddp.py.
    del way, ways
    dist.destroy_process_group()


def _measure(world: int, steps: int) -> Any:
    context = mp.get_context("spawn")
    answer = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        started = mp.spawn(_rank, (world, steps, store, answer), nprocs=world, join=False)
        found = answer.get(timeout=300)
        while not started.join():
            pass
    return found


def run(worlds: list[int], steps: int) -> dict[str, Any]:
    """Measure each world, print a table, and return the figures."""
    rows: list[dict[str, Any]] = []
    bits: set[str] = set()
    reference: Any = None
    wanted = sorted(_samples((WARM_STEPS + steps) * COUNT))
    lost = repeated = 0
    for world in worlds:
        seconds, parameters, seen = _measure(world, steps)
        bits.add(hashlib.sha256(parameters["same_bits"].tobytes()).hexdigest())
        exact = torch.from_numpy(parameters["same_bits"])
        reference = exact if reference is None else reference
        lost += len(set(wanted) - set(seen))
        repeated += len(seen) - len(set(seen))
        row: dict[str, Any] = {"ranks": world}
        for way in WAYS:
            row[f"{way}_step_ms"] = statistics.median(seconds[way]) * 1e3
        row["same_bits_cost"] = row["same_bits_step_ms"] / row["all_reduce_step_ms"] - 1
        other = torch.from_numpy(parameters["all_reduce"])
        row["difference_without"] = float((other - reference).norm() / reference.norm())
        rows.append(row)
    found = {
        "bit_equal": len(bits) == 1,
        "samples_lost": lost,
        "samples_repeated": repeated,
        "worlds": rows,
    }
    _show(found)
    return found


def _samples(microbatches: int) -> list[int]:
    order = ReplayLoader(Waves(), global_batch=SIZE, cache=False).order
    return [int(index) for number in range(microbatches) for index in order.indices(number)]


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ranks": lambda row: str(row["ranks"]),
    "DDP": lambda row: f"{row['ddp_step_ms']:.1f} ms",
    "one all-reduce": lambda row: f"{row['all_reduce_step_ms']:.1f} ms",
    "same bits": lambda row: f"{row['same_bits_step_ms']:.1f} ms",
    "cost": lambda row: f"{row['same_bits_cost']:+.0%}",
    "parameters without it differ by": lambda row: f"{row['difference_without']:.1e}",
}


def _show(found: dict[str, Any]) -> None:
    equal = "equal" if found["bit_equal"] else "NOT equal"
    title = f"a step; the bits with same_bits are {equal} in all worlds"
    table = Table(title=title, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in found["worlds"]:
        table.add_row(*(cell(row) for cell in COLUMNS.values()))
    console = Console(highlight=False, file=sys.stderr)
    console.print(table)
    lost, repeated = found["samples_lost"], found["samples_repeated"]
    console.print(f"samples lost: {lost}; repeated: {repeated}")


def _with_changes(found: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Add the figures of changes; what is true of both must be true of each."""
    changed = elastic_changes.measure(rounds)
    console = Console(highlight=False, file=sys.stderr)
    equal = "equal" if changed["bit_equal"] else "NOT equal"
    console.print(
        f"a rank is lost: {changed['shrink_s']:.2f} s until the others step; another joins: "
        f"{changed['grow_s']:.2f} s of standstill; the bits are {equal} to an undisturbed run's"
    )
    for name in ("shrink", "grow"):
        seconds = changed[f"{name}_parts_s"].items()
        console.print(f"  {name}: " + ", ".join(f"{part} {took:.3f} s" for part, took in seconds))
    console.print(
        f"the same loss, all from a checkpoint: {changed['checkpoint_restart_s']:.2f} s "
        f"({changed['speedup_over_checkpoint_restart']:.1f} times as long)"
    )
    lost, repeated = changed["samples_lost"], changed["samples_repeated"]
    console.print(f"samples lost: {lost}; repeated: {repeated}")
    return changed | {
        "bit_equal": found["bit_equal"] and changed["bit_equal"],
        "samples_lost": found["samples_lost"] + lost,
        "samples_repeated": found["samples_repeated"] + repeated,
        "worlds": found["worlds"],
    }


def _on_slurm() -> dict[str, Any]:
    """Measure the elastic job; null where no lab can be built."""
    console = Console(highlight=False, file=sys.stderr)
    try:
        found = elastic_lab.measure()
    except SresError as error:
        console.print(f"idle_to_grown_s and evacuation_standstill_steps are not measured: {error}")
        return {"idle_to_grown_s": None, "evacuation_standstill_steps": None}
    console.print(
        f"an elastic job on Slurm: {found['idle_to_grown_s']:.1f} s from a free node to steps with "
        f"it; a sick node of a companion is left with {found['evacuation_standstill_steps']:.1f} "
        f"steps of standstill at most (of {found['evacuation_step_s'] * 1e3:.0f} ms each)"
    )
    return found


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--ranks", default="2,3,4", show_default=True, metavar="N,…", help="Worlds.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(1), help="To time.")
@click.option("--changes/--no-changes", default=True, show_default=True, help="Of the size.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Of changes.")
@click.option("--slurm/--no-slurm", default=True, show_default=True, help="A job on a lab.")
def main(
    json_file: Path | None, ranks: str, steps: int, changes: bool, rounds: int, slurm: bool
) -> None:
    # What runs is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        worlds = [int(word) for word in ranks.split(",")]
    except ValueError:
        raise click.UsageError(f"--ranks {ranks!r}: write numbers, as 2,3,4") from None
    if min(worlds) < 1:
        raise click.UsageError("--ranks: a world has at least one rank")
    found = run(worlds, steps)
    if changes:
        found = _with_changes(found, rounds)
    if slurm:
        found |= _on_slurm()
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
