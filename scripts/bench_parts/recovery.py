#!/usr/bin/env python3
"""The main job, several times for each fault: seconds from the fault to each phase, as medians.

Beside it stands what stock Slurm's defaults were measured to take for a power loss (396 s until the
node is DOWN, 532 s until the job runs again); that run takes nine minutes and is not repeated here.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from slurm_resilience.demo.main import run
from slurm_resilience.demo.phases import NAMES, Fault

FAULTS: tuple[Fault, ...] = ("power", "xid", "admin", "rank")
STOCK = {"marked": 396.0, "relaunched": 532.0}


def medians(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Each phase's median over the runs of one fault; None where the fault has no such phase."""
    found: dict[str, float | None] = {}
    for name in NAMES:
        values = [r["phases"][name] for r in runs if r["phases"][name] is not None]
        found[name] = statistics.median(values) if values else None
    return found


@click.command()
@click.option("--runs", default=3, show_default=True, help="Runs of each fault.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(runs: int, json_file: Path | None) -> None:
    """Time the main job."""
    console = Console(highlight=False)
    quiet = Console(quiet=True)
    found: dict[str, list[dict[str, Any]]] = {fault: [] for fault in FAULTS}
    for number in range(1, runs + 1):
        for fault in FAULTS:
            console.print(f"run {number} of {runs}: {fault} ...")
            found[fault].append(run(fault, "", False, 300, 0.02, quiet))
    table = Table(title=f"Seconds since the fault, medians of {runs} runs", title_justify="left")
    table.add_column("phase")
    for fault in FAULTS:
        table.add_column(fault, justify="right")
    table.add_column("stock Slurm (power)", justify="right")
    columns = {fault: medians(found[fault]) for fault in FAULTS}
    for name in NAMES:
        cells = [columns[fault][name] for fault in FAULTS]
        stock = STOCK.get(name)
        table.add_row(
            name,
            *("–" if cell is None else f"{cell:.2f}" for cell in cells),
            "" if stock is None else f"{stock:.0f}",
        )
    console.print(table)
    equal = all(r["bit_equal"] for rows in found.values() for r in rows)
    console.print(f"final parameters bit-equal in all {runs * len(FAULTS)} runs: {equal}")
    if json_file is not None:
        json_file.write_text(json.dumps({"medians": columns, "runs": found}, indent=2) + "\n")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
