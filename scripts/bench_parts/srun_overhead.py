#!/usr/bin/env python3
"""Measure what the SPANK plugin costs an srun that did not ask for it, and one that did.

Starts a lab, and in one allocation on it runs `srun -N1 -n1 true` in pairs: once with the plugin in
plugstack.conf and once with plugstack.conf empty. srun and slurmstepd both read that file anew at
every step, so both sides' cost is in the figure; which of a pair goes first alternates. Then
`srun --auto-resume=1` follows as often, up to FLAGGED_RUNS times.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from slurm_resilience.lab import Lab, LabSpec

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = ("srun", "-N1", "-n1", "true")
FLAGGED = ("srun", "--auto-resume=1", *COMMAND[1:])
FLAGGED_RUNS = 50
WARM_UP = 5
LIMIT_PERCENT = 2.0


def measure(runs: int) -> dict[str, Any]:
    """Start a lab, time ``runs`` pairs on it, and return what `report` prints."""
    subprocess.run(["make", "-s", "-C", REPOSITORY / "spank"], check=True)
    plugin = REPOSITORY / "spank" / "sres.so"
    spec = LabSpec(nodes=1, daemons=False, plugin=plugin, lifecycle=None)
    with Lab.up(spec, name=f"overhead-{os.getpid()}") as lab:
        plugstack = lab.directory / "etc" / "plugstack.conf"
        inside = [sys.executable, __file__, "--inside", str(plugstack), "--runs", str(runs)]
        # What runs inside does nothing but start srun: entering the lab is not timed.
        words = ["salloc", "-Q", "-N1", "--exclusive", *inside]
        done = lab.run(words, cwd=lab.directory, timeout=60 + 2 * runs, check=True)
    times: dict[str, list[float]] = json.loads(done.stdout)
    return summary(times)


def time_pairs(plugstack: Path, runs: int) -> dict[str, list[float]]:
    """Milliseconds of each run, by arm; the n-th of both belong together."""
    arms = {"with": plugstack.read_text(), "without": ""}
    times: dict[str, list[float]] = {arm: [] for arm in (*arms, "flagged")}
    for pair in range(-WARM_UP, runs):
        for arm in sorted(arms, reverse=pair % 2 == 0):
            plugstack.write_text(arms[arm])
            taken = _milliseconds(COMMAND)
            if pair >= 0:
                times[arm].append(taken)
    plugstack.write_text(arms["with"])
    for number in range(-WARM_UP, min(runs, FLAGGED_RUNS)):
        taken = _milliseconds(FLAGGED)
        if number >= 0:
            times["flagged"].append(taken)
    return times


def _milliseconds(words: tuple[str, ...]) -> float:
    start = time.perf_counter()
    subprocess.run(words, stdin=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - start) * 1000


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, their ratio, and how far the ratio may be off (bootstrap over the pairs, 95 %)."""
    pairs = list(zip(times["with"], times["without"], strict=True))
    chance = random.Random(0)
    resampled = sorted(_ratio(chance.choices(pairs, k=len(pairs))) for _ in range(1000))
    return {
        "bench": "srun-overhead",
        "command": " ".join(COMMAND),
        "runs": len(pairs),
        "median_with_ms": statistics.median(times["with"]),
        "median_without_ms": statistics.median(times["without"]),
        "median_flagged_ms": statistics.median(times["flagged"]),
        "median_ratio": _ratio(pairs),
        "ratio_interval": [resampled[25], resampled[974]],
        "verdict": _verdict(resampled[25], resampled[974]),
        "times_ms": times,
    }


def _ratio(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(w for w, _ in pairs) / statistics.median(o for _, o in pairs)


def _verdict(low: float, high: float) -> str:
    """Judge an interval: a busy machine makes it wide, and then the figure settles nothing."""
    limit = 1 + LIMIT_PERCENT / 100
    if high <= limit:
        return "kept"
    return "broken" if low > limit else "undecided; repeat on a quiet machine or with more --runs"


def report(result: dict[str, Any]) -> str:
    """Return the result as text."""
    low, high = result["ratio_interval"]
    return (
        f"{result['command']}, {result['runs']} pairs in one allocation, medians:\n"
        f"  with the plugin     {result['median_with_ms']:7.2f} ms\n"
        f"  without             {result['median_without_ms']:7.2f} ms\n"
        f"  ratio               {result['median_ratio']:7.4f}    (95 %: {low:.4f} to {high:.4f}), "
        f"limit {LIMIT_PERCENT:g} %: {result['verdict']}\n"
        f"  with --auto-resume=1 {result['median_flagged_ms']:6.1f} ms    "
        f"({result['median_flagged_ms'] - result['median_with_ms']:+.1f} ms)"
    )


@click.command(help=__doc__)
@click.option(
    "--runs", default=200, show_default=True, type=click.IntRange(2), help="Pairs of runs."
)
@click.option(
    "--json", "output", type=click.Path(path_type=Path), help="Write the result here too."
)
@click.option("--inside", type=click.Path(path_type=Path), hidden=True)
def main(runs: int, output: Path | None, inside: Path | None) -> None:
    if inside is not None:
        click.echo(json.dumps(time_pairs(inside, runs)))
        return
    result = measure(runs)
    click.echo(report(result))
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
