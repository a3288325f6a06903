"""Measure each rung of auto-resume, from the fault to the first optimizer step after it.

A real Slurm of six nodes on this machine, four of them training (a small DDP model, one gloo rank
a node, a checkpoint each 50 steps of 20 ms); medians over the rounds. Beside the rungs stand what
stock Slurm's requeue and torchrun's own restart need for the same. A rung that is not there, or
was not taken, has no figure, and a line says why.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from drive import RungRun, WrongRung, end_on_sigterm
from phases import NAMES, Phases, medians, report
from rich.console import Console
from rich.table import Table
from rungs import KEYS, RUNGS, STOCK_DEFAULT, LabKind, Rung

from slurm_resilience.errors import SresError
from slurm_resilience.lab import Lab, LabSpec

ROOM = "slurm_resilience/resume/allocation"
# The same node is lost in each round, and is no lemon for that.
OFTEN = {
    "recovery": {"max_replacements": 1000, "max_repairs": 1000, "max_flaps": 1000},
    "replace": {"attempts": 1000, "max_per_hour": 1000},
}
# slurmctld 22.05 leaves a node that was lost and came back out of its choice, though it shows it as
# idle, from the end of the next job there until it pings the node: SlurmdTimeout / 3.
PINGS = {"SlurmdTimeout": "15"}
SPECS: dict[LabKind, dict[str, Any]] = {
    "plain": {"sres_options": OFTEN, "options": PINGS},
    "gres": {"gres": "gpu:2", "sres_options": OFTEN, "options": PINGS},
    "stock": {"daemons": False, "plugin": None, "options": {"SlurmdTimeout": "15"}},
    "stock_default": {"daemons": False, "plugin": None},
}
NODES = 6
WIDTH = 130
"""Width of the table in a file."""
FAILURES = 2
"""A rung that fails so often in a row is given up."""


def missing_rungs() -> dict[str, str]:
    """Return the rungs that this tree does not have, and the reason."""
    room = Path(__file__).resolve().parents[3] / ROOM
    if any(room.glob("companion*.py")):
        return {}
    return {"companion": f"no companion allocation is built here ({ROOM})"}


def chosen(only: str, stock_default: bool) -> list[Rung]:
    """Return the rungs to be measured.

    Raises:
        UsageError: there is no rung of such a name.
    """
    known = {rung.name: rung for rung in (*RUNGS, STOCK_DEFAULT)}
    names = [word.strip().removesuffix("_s") for word in only.split(",") if word.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no such rung: {', '.join(unknown)}; known: {', '.join(known)}")
    rungs = [known[name] for name in names] or list(RUNGS)
    return [*rungs, STOCK_DEFAULT] if stock_default and STOCK_DEFAULT not in rungs else rungs


def measure(
    rungs: list[Rung], rounds: int, stock_rounds: int, console: Console
) -> tuple[dict[str, list[Phases]], dict[str, str]]:
    """Run all rounds, one lab for each kind; return the runs, and the rungs without one."""
    runs: dict[str, list[Phases]] = {rung.name: [] for rung in rungs}
    missing = {name: why for name, why in missing_rungs().items() if name in runs}
    for kind, spec in SPECS.items():
        todo = [rung for rung in rungs if rung.lab == kind and rung.name not in missing]
        if not todo:
            continue
        order = LabSpec(nodes=NODES, network=True, **spec)
        with Lab.up(order, name=f"resume-{kind.replace('_', '-')}-{os.getpid()}") as lab:
            several = stock_rounds if kind == "stock" else 1 if kind == "stock_default" else rounds
            failed: dict[str, int] = {}
            for number in range(1, several + 1):
                for rung in todo:
                    if failed.get(rung.name, 0) < FAILURES:
                        why = one_run(lab, rung, number, runs[rung.name], console)
                        failed[rung.name] = failed.get(rung.name, 0) + 1 if why else 0
                        if why and not runs[rung.name]:
                            missing[rung.name] = why
    return runs, {name: why for name, why in missing.items() if not runs[name]}


def one_run(lab: Lab, rung: Rung, number: int, into: list[Phases], console: Console) -> str:
    """Run a rung once. Returns why it gave no figure; empty: it did."""
    run = RungRun(lab, rung, number, Console(quiet=True))
    trouble = ""
    try:
        found = run.measure()
        into.append(found)
    except (SresError, WrongRung) as error:
        console.print(f"{rung.name}, run {number}: no figure: {error}", markup=False)
        trouble = str(error).splitlines()[0]
    try:
        run.clear()
    except SresError as error:
        console.print(f"{rung.name}, run {number}: {error}", markup=False)
        trouble = trouble or str(error).splitlines()[0]
    if trouble:
        return trouble
    told = ", ".join(f"{name} {found[name]:.2f}" for name in NAMES if found[name] is not None)
    console.print(f"{rung.name}, run {number}: {told}", markup=False)
    return ""


def show(console: Console, runs: dict[str, list[Phases]], missing: dict[str, str]) -> None:
    """Print the table, and why a rung is not in it."""
    table = Table(title="Seconds since the fault, medians", title_justify="left")
    for column in ("rung", "runs", *NAMES, "target"):
        justify = "left" if column == "rung" else "right"
        table.add_column(column.replace("_", " "), justify=justify)
    for rung in (*RUNGS, STOCK_DEFAULT):
        if runs.get(rung.name):
            found = medians(runs[rung.name])
            cells = ("–" if (x := found[name]) is None else f"{x:.2f}" for name in NAMES)
            first, target = found["first_step"], rung.target
            over = target is not None and (first is None or first > target)
            wanted = "" if target is None else f"{'missed: ' if over else ''}≤ {target:g}"
            style = "bold red" if over else None
            table.add_row(rung.label, str(len(runs[rung.name])), *cells, wanted, style=style)
    console.print(table)
    for name, why in missing.items():
        console.print(f"{name}: no figure: {why}", markup=False)


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Runs a rung.")
@click.option("--only", default="", metavar="RUNG,…", help="Only these rungs.")
@click.option(
    "--stock-rounds",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of stock Slurm's requeue, which takes minutes.",
)
@click.option(
    "--stock-default",
    is_flag=True,
    help="Stock Slurm's requeue with its own time-outs too: nine minutes.",
)
def main(
    json_file: Path | None, rounds: int, only: str, stock_rounds: int, stock_default: bool
) -> None:
    end_on_sigterm()
    rungs = chosen(only, stock_default)
    wanted = any(SPECS[rung.lab].get("plugin", "auto") for rung in rungs)
    if wanted and LabSpec(nodes=1).plugin_file() is None:
        raise click.UsageError("the SPANK plugin is not built; run make -C spank")
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    runs, missing = measure(rungs, rounds, stock_rounds, console)
    show(console, runs, missing)
    if json_file is not None:
        json_file.write_text(json.dumps(report(KEYS, runs, missing), indent=2) + "\n")


if __name__ == "__main__":
    main()
