"""The demo's closing table: each phase with its seconds, and targets that were missed. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

STOCK_POWER_LOSS = (
    "Stock Slurm's defaults, measured for the same power loss: node marked after 396 s, job "
    "running again after 532 s"
)


def phase_table(
    title: str,
    labels: Mapping[str, str],
    seconds: Mapping[str, float | None],
    targets: Mapping[str, float],
) -> Table:
    """Return the table; a phase over its target, or with a target and not seen, is flagged."""
    table = Table(title=title, title_justify="left", min_width=60)
    table.add_column("phase")
    table.add_column("seconds since the fault", justify="right")
    table.add_column("target", justify="right")
    for name, label in labels.items():
        value, target = seconds[name], targets.get(name)
        shown = "–" if value is None else f"{value:.2f}"
        wanted = "" if target is None else f"≤ {round(target, 2):g}"
        style = None
        if target is not None and (value is None or value > target):
            wanted, style = f"missed: {wanted}", "bold red"
        table.add_row(label, shown, wanted, style=style)
    return table
