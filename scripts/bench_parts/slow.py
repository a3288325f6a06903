#!/usr/bin/env python3
"""Measure how well the judge of speeds names devices that are slow without an error.

Each of 200 seeded cases is a fleet of devices whose speeds are measured 80 times; in half of them
one device becomes slow at some point, in the other half none does. Named rightly: the slow device,
and no other. Each name that is wrong counts against the precision, each slow device that is not
named before the end against the recall.

The noise, as a part of the speed:
  device   normal, 3 %: GPUs of one kind differ by 8 % on average (Sinha et al., "Not All GPUs Are
           Created Equal", SC22)
  measure  log-normal, 0.5 to 3 % by device; that of this machine's processors stands beside it
  hiccup   5 % of the measures lose 5 to 50 %: another program was running
  day      a wave of 1 % with its own phase (heat)
  all      in a third of the cases all devices lose 3 to 10 % for good (a new driver)
The slow device loses 8 to 60 % at once, bit by bit over ten measures, or in 80 % of its measures.

`--real` measures this machine's processors too, each processor a device, with the probe of deep
checks, while another process competes for one of them in the last measures.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import click

from slurm_resilience.deepcheck.speed.speed_judge import (
    SpeedHistory,
    SpeedKey,
    slow_devices,
    spread_of,
)

CASES = 200
DEVICES = 16
MEASURES = 80
KEPT = 60
"""Measures that the judge is shown, as the store keeps them."""
FIRST_SLOW, LAST_SLOW = 20, 60
LIMITS = {"precision": 0.95, "recall": 0.9}


class Case(NamedTuple):
    """A fleet, and the device that becomes slow."""

    series: list[list[float]]
    slow: int | None
    since: int


def make_case(seed: int, has_slow: bool) -> Case:
    """Return one seeded case."""
    rng = random.Random(seed)
    since = rng.randrange(FIRST_SLOW, LAST_SLOW)
    slow = rng.randrange(DEVICES) if has_slow else None
    common_at = rng.randrange(MEASURES) if rng.random() < 1 / 3 else MEASURES
    common = rng.uniform(0.03, 0.10)
    loss, manner = rng.uniform(0.08, 0.60), rng.choice(["at once", "bit by bit", "at times"])
    series = []
    for device in range(DEVICES):
        speed, sigma = rng.gauss(100.0, 3.0), rng.uniform(0.005, 0.03)
        phase = rng.uniform(0, 2 * math.pi)
        values = []
        for at in range(MEASURES):
            value = speed * rng.lognormvariate(0.0, sigma)
            value *= 1 + 0.01 * math.sin(phase + 2 * math.pi * at / 24)
            value *= 1 - rng.uniform(0.05, 0.5) if rng.random() < 0.05 else 1.0
            value *= 1 - common if at >= common_at else 1.0
            if device == slow and at >= since:
                share = min(1.0, (at - since + 1) / 10) if manner == "bit by bit" else 1.0
                share *= rng.random() < 0.8 if manner == "at times" else 1.0
                value *= 1 - loss * share
            values.append(value)
        series.append(values)
    return Case(series, slow, since)


def play(case: Case) -> tuple[set[int], int | None]:
    """Judge after each measure; return who was named wrongly, and the measures until the slow one
    was named."""
    wrong: set[int] = set()
    steps = None
    for until in range(1, len(case.series[0]) + 1):
        histories = [
            SpeedHistory(
                SpeedKey(str(n), "d", "compute"), "x", tuple(s[max(0, until - KEPT) : until])
            )
            for n, s in enumerate(case.series)
        ]
        for one in slow_devices(histories):
            number = int(one.key.node)
            if number != case.slow or until <= case.since:
                wrong.add(number)
            elif steps is None:
                steps = until - case.since
    return wrong, steps


def seeded(cases: int, seed: int) -> dict[str, float]:
    """Return the figures over seeded cases."""
    right = wrong = missed = 0
    steps: list[int] = []
    for number in range(2 * cases):
        named_wrongly, took = play(case := make_case(seed + number, number % 2 == 0))
        wrong += len(named_wrongly)
        right += took is not None
        missed += case.slow is not None and took is None
        steps += [took] if took is not None else []
    precision, recall = right / max(1, right + wrong), right / max(1, right + missed)
    return {
        "cases": cases,
        "slow_downs": right + missed,
        "named": right,
        "named_wrongly": wrong,
        "precision": round(precision, 4),
        "recall": round(recall, 4),
        "f1": round(2 * precision * recall / max(1e-9, precision + recall), 4),
        "steps_to_name": median(steps) if steps else math.inf,
        "steps_to_name_mean": round(fmean(steps), 2) if steps else math.inf,
        "steps_to_name_most": max(steps, default=0),
    }


def real(measures: int, slow_measures: int) -> dict[str, object]:
    """Measure each processor of this machine, one of them beside a competitor at the end."""
    from slurm_resilience.deepcheck.speed.speed_probe import compute_rate

    processors = sorted(os.sched_getaffinity(0))
    # The same processor stands for several peers: its measures are dealt out in turn.
    series: dict[int, list[float]] = {cpu: [] for cpu in processors}
    victim, competitor = processors[-1], None
    try:
        for at in range(measures + slow_measures):
            if at == measures:
                burn = f"import os; os.sched_setaffinity(0, [{victim}])\nwhile True: pass"
                competitor = subprocess.Popen([sys.executable, "-c", burn])
            for cpu in processors:
                os.sched_setaffinity(0, [cpu])
                series[cpu].append(compute_rate(1))
    finally:
        os.sched_setaffinity(0, processors)
        if competitor is not None:
            competitor.kill()
            competitor.wait()
    quiet = {cpu: values[:measures] for cpu, values in series.items()}
    deal = 4  # the quiet processors' measures, dealt out, are so many peers
    peers: list[list[float]] = []
    for cpu in processors[:-1]:
        peers += [series[cpu][start::deal] for start in range(deal)]
    length = min(map(len, peers))
    slow_from = measures // deal
    own = [*quiet[victim][::deal][:slow_from], *series[victim][measures:]][:length]
    shown = [own, *(values[:length] for values in peers)]
    wrong, steps = play(Case(shown, 0, slow_from))
    return {
        "processors": len(processors),
        "measures": measures,
        "spread": {cpu: round(spread_of(values), 4) for cpu, values in quiet.items()},
        "speed_beside_a_competitor": round(
            median(series[victim][measures:]) / median(quiet[victim]), 3
        ),
        "named_wrongly": len(wrong),
        "steps_to_name": steps,
        "load": os.getloadavg()[0],
    }


@click.command()
@click.option("--cases", default=CASES, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--real", "real_measures", default=0, help="Measures of this machine's processors.")
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(cases: int, seed: int, real_measures: int, file: Path | None) -> None:
    """Play the cases, print the figures, and exit with 1 where they miss the wish."""
    figures: dict[str, object] = dict(seeded(cases, seed))
    if real_measures:
        figures["real"] = real(real_measures, max(20, real_measures // 4))
    text = json.dumps(figures, indent=1)
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")
    missed = [key for key, least in LIMITS.items() if float(str(figures[key])) < least]
    if missed:
        click.echo(f"missed: {', '.join(missed)}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
