#!/usr/bin/env python3
"""Measure what the SPANK plugin costs an srun that did not ask for it, and one that did.

Starts a lab, and in one allocation on it runs `srun -N1 -n1 true` in pairs: once with the plugin in
plugstack.conf and once with plugstack.conf empty. srun and slurmstepd both read that file anew at
every step, so both sides' cost is in the figure; which of a pair goes first alternates.

Then, on a lab with sresctld and sresd, follow pairs of `srun` and `srun --auto-resume=1`, which
alternate too. Their task prints the time, so that two parts are told apart: from the command to the
task's start, and from there to srun's end. The processor time is that of srun and of all that it
started; what slurmctld, slurmd and slurmstepd take to answer is not in it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click

from slurm_resilience.lab import Lab, LabSpec

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = ("srun", "-N1", "-n1", "true")
TOLD = ("-N1", "-n1", "date", "+%s.%N")
PAIR = {"plain": ("srun", *TOLD), "flagged": ("srun", "--auto-resume=1", *TOLD)}
WARM_UP = 5
LIMIT_PERCENT = 2.0
ADDED_LIMIT_MS = 60.0
"""Wall time that a supervisor may add."""


class FlaggedRun(NamedTuple):
    """Milliseconds of one srun."""

    wall: float
    to_start: float
    """From the command to its task's start."""
    from_start: float
    """From there to srun's end."""
    processor: float


def measure(runs: int, flagged_runs: int) -> dict[str, Any]:
    """Start labs, time so many pairs on them, and return what `report` prints."""
    subprocess.run(["make", "-s", "-C", REPOSITORY / "spank"], check=True)
    load = os.getloadavg()[0]
    # The daemons would only disturb: they have nothing to do with an srun without the flag.
    unflagged = _in_lab("unflagged", runs, daemons=False)
    told = _in_lab("flagged", flagged_runs, daemons=True)
    flagged = {arm: [FlaggedRun(*run) for run in taken] for arm, taken in told.items()}
    return summary(unflagged) | flagged_summary(flagged) | {"load": load}


def _in_lab(inside: str, runs: int, *, daemons: bool) -> Any:
    plugin = REPOSITORY / "spank" / "sres.so"
    spec = LabSpec(nodes=1, daemons=daemons, plugin=plugin, lifecycle=None)
    with Lab.up(spec, name=f"overhead-{os.getpid()}") as lab:
        plugstack = lab.directory / "etc" / "plugstack.conf"
        timing = [sys.executable, __file__, "--inside", inside, "--plugstack", str(plugstack)]
        # What runs inside does nothing but start srun: entering the lab is not timed.
        words = ["salloc", "-Q", "-N1", "--exclusive", *timing, "--runs", str(runs)]
        done = lab.run(words, cwd=lab.directory, timeout=60 + 2 * runs, check=True)
    return json.loads(done.stdout)


def time_pairs(plugstack: Path, runs: int) -> dict[str, list[float]]:
    """Milliseconds of each run, by arm; the n-th of both belong together."""
    arms = {"with": plugstack.read_text(), "without": ""}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for pair in range(-WARM_UP, runs):
        for arm in sorted(arms, reverse=pair % 2 == 0):
            plugstack.write_text(arms[arm])
            taken = _milliseconds(COMMAND)
            if pair >= 0:
                times[arm].append(taken)
    plugstack.write_text(arms["with"])
    return times


def time_flagged(runs: int) -> dict[str, list[FlaggedRun]]:
    """Time pairs of sruns without and with the flag, by arm; the n-th of both belong together."""
    times: dict[str, list[FlaggedRun]] = {arm: [] for arm in PAIR}
    for pair in range(-WARM_UP, runs):
        for arm in sorted(PAIR, reverse=pair % 2 == 0):
            taken = _timed(PAIR[arm])
            if pair >= 0:
                times[arm].append(taken)
    return times


def _timed(words: tuple[str, ...]) -> FlaggedRun:
    began = time.time()
    # A file: a pipe's reader would be woken beside what is timed.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        ended = time.time()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
        output.seek(0)
        started = float(output.read())
    processor = used.ru_utime + used.ru_stime
    spans = (ended - began, started - began, ended - started, processor)
    return FlaggedRun(*(1000 * seconds for seconds in spans))


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
        "median_ratio": _ratio(pairs),
        "ratio_interval": [resampled[25], resampled[974]],
        "verdict": _verdict(resampled[25], resampled[974]),
        "times_ms": times,
    }


def flagged_summary(times: dict[str, list[FlaggedRun]]) -> dict[str, Any]:
    """Return the medians of what the flag adds within each pair, with their quartiles."""
    pairs = list(zip(times["flagged"], times["plain"], strict=True))
    added: dict[str, Any] = {}
    for part in FlaggedRun._fields:
        differences = [getattr(flagged, part) - getattr(plain, part) for flagged, plain in pairs]
        quartiles = statistics.quantiles(differences, n=4)
        added[part] = {"median_ms": quartiles[1], "quartiles_ms": [quartiles[0], quartiles[2]]}
    plain = {
        part: statistics.median(getattr(run, part) for run in times["plain"])
        for part in FlaggedRun._fields
    }
    return {"added": added, "plain_ms": plain, "flagged_times_ms": times}


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
        f"{' '.join(PAIR['flagged'])}, {len(result['flagged_times_ms']['plain'])} pairs\n"
        f"(load {result['load']:.1f} before), medians of what the flag adds:\n"
        + "\n".join(_added_line(part, name, result) for part, name in PARTS.items())
        + f"\n  limit {ADDED_LIMIT_MS:g} ms: "
        + ("kept" if result["added"]["wall"]["median_ms"] <= ADDED_LIMIT_MS else "broken")
    )


PARTS = {
    "wall": "wall time",
    "to_start": "to the task's start",
    "from_start": "from there to the end",
    "processor": "processor time",
}


def _added_line(part: str, name: str, result: dict[str, Any]) -> str:
    added, plain = result["added"][part], result["plain_ms"][part]
    low, high = added["quartiles_ms"]
    return (
        f"  {name:22s} {added['median_ms']:+7.1f} ms    (quartiles {low:+.1f} to {high:+.1f}; "
        f"plain {plain:.1f} ms)"
    )


@click.command(help=__doc__)
@click.option(
    "--runs", default=200, show_default=True, type=click.IntRange(2), help="Pairs of runs."
)
@click.option(
    "--flagged-runs",
    default=50,
    show_default=True,
    type=click.IntRange(2),
    help="Pairs of runs with and without the flag.",
)
@click.option(
    "--json", "output", type=click.Path(path_type=Path), help="Write the result here too."
)
@click.option("--inside", type=click.Choice(["unflagged", "flagged"]), hidden=True)
@click.option("--plugstack", type=click.Path(path_type=Path), hidden=True)
def main(
    runs: int, flagged_runs: int, output: Path | None, inside: str | None, plugstack: Path | None
) -> None:
    if inside is not None:
        assert plugstack is not None
        times = time_pairs(plugstack, runs) if inside == "unflagged" else time_flagged(runs)
        click.echo(json.dumps(times))
        return
    result = measure(runs, flagged_runs)
    click.echo(report(result))
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
