"""Measure how long a training stands still after a fault, here and elsewhere, and its cost.

One machine, one model (3-layer MLP, DDP, AdamW, 20 ms more a step), 4 gloo ranks; medians, with
the number of runs in brackets. The rivals are tuned: torchrun with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, nvidia-resiliency-ext with 50 ms intervals and 1 s of gloo
timeout, torchft with a heartbeat and a gloo timeout of 0.5 s, 1 s to join, and a tick of 20 ms.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
import quiet_names
import rivals as rival_room
from rich.console import Console

quiet_names.settle()

import figures  # noqa: E402
from drive import RunFailed  # noqa: E402
from plan import Part, chosen, costs, parts  # noqa: E402
from table import show  # noqa: E402

COSTS = (
    "step_overhead",
    "step_cpu_us",
    "step_cpu_main_us",
    "step_cpu_mesh_us",
    "step_update_us",
    "step_warm_us",
    "digest_overhead",
)
"""Figures of one run that is no part of a round: it takes turns itself."""


def one_round(part: Part, found: dict[str, list[float]]) -> str:
    """Run a part once; its values go to ``found``. A line about it."""
    values = part.run()
    for key, value in values.items():
        found.setdefault(key, []).append(value)
    return ", ".join(f"{key} {values[key]:.3f}" for key in part.keys if key in values)


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--only", default="", metavar="KEY,…", help="Only what gives these figures.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Rounds.")
def main(json_file: Path | None, only: str, repeats: int) -> None:
    # What runs is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    keys = [key.strip() for key in only.split(",") if key.strip()]
    unknown = [key for key in keys if key not in figures.KEYS]
    if unknown:
        raise click.UsageError(f"no such figure: {', '.join(unknown)}; known: {figures.KEYS}")
    console = Console(highlight=False)
    others = rival_room.ready(console.print)
    # Packages are installed: no part needs a name server from here on.
    quiet_names.enter(sys.argv)
    for name, why in others.missing.items():
        console.print(f"{name} cannot be installed, its figures stay empty: {why}", markup=False)
    if not quiet_names.ready():
        console.print("the name server is in reach: TCPStore's figures may hold pauses of 5 s")
    detail = measure(console, chosen(parts(others, repeats), keys), others.missing, repeats)
    if wanted := [key for key in COSTS if not keys or key in keys]:
        found = _costs(console, repeats)
        detail |= {key: found[key] for key in wanted}
    show(console, detail)
    if json_file is not None:
        medians = {key: detail.get(key, {}).get("median") for key in figures.KEYS}
        report = {**medians, "detail": detail, "missing": others.missing}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(
    console: Console, todo: list[Part], missing: dict[str, str], repeats: int
) -> dict[str, dict[str, Any]]:
    """Run all rounds, each part once a round: a busy moment of the machine then hits all parts."""
    found: dict[str, list[float]] = {}
    failed: dict[str, list[str]] = {}
    for turn in range(1, repeats + 1):
        for part in todo:
            if part.rival in missing or (part.once and turn > 1):
                continue
            began = time.monotonic()
            try:
                said = one_round(part, found)
            except (RunFailed, OSError, RuntimeError, AssertionError) as error:
                said = f"failed: {error}"
                for key in part.keys:
                    failed.setdefault(key, []).append(str(error))
            spent = time.monotonic() - began
            line = f"round {turn} of {repeats}: {part.name} ({spent:.0f} s): {said}"
            console.print(line, soft_wrap=True, markup=False)
    detail = {key: figures.summary(values) for key, values in found.items()}
    for part in todo:
        for key in part.keys if part.once else ():
            if key in detail:
                detail[key]["n"] = part.own_n
    for key, errors in failed.items():
        detail.setdefault(key, figures.summary([]))["failed"] = errors
    return detail


def _costs(console: Console, repeats: int) -> dict[str, dict[str, Any]]:
    console.print("a step under the library ...")
    try:
        return costs(repeats)
    except RunFailed as error:
        console.print(f"failed: {error}", markup=False)
        return {key: {**figures.summary([]), "failed": [str(error)]} for key in COSTS}


if __name__ == "__main__":
    main()
