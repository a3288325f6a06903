"""The figures as tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from figures import SIZES, STAGES
from rich.console import Console
from rich.table import Table

_NAMES = ("ours", "torchrun", "nvrx", "torchft")
_FAULTS = (
    ("exception, all 4", "exception_all_s", "torchrun_exception_all_s", "nvrx_exception_all_s", ""),
    ("  right after backward, p99", "exception_after_backward_p99_s", "", "", ""),
    ("    of a model in parts", "exception_after_backward_hsdp_p99_s", "", "", ""),
    (
        "SIGKILL, the 3 survivors",
        "sigkill_survivors_s",
        "",
        "nvrx_sigkill_survivors_s",
        "torchft_sigkill_survivors_s",
    ),
    (
        "SIGKILL, all 4, cold",
        "sigkill_all_cold_s",
        "torchrun_sigkill_all_s",
        "",
        "torchft_sigkill_all_s",
    ),
    ("SIGKILL, all 4, standby", "sigkill_all_warm_s", "", "", ""),
    ("  no library, warm", "plain_sigkill_warm_s", "torchrun_sigkill_all_s", "", ""),
    ("  no library, cold", "plain_sigkill_cold_s", "torchrun_sigkill_all_s", "", ""),
    ("… from a disk checkpoint", "", "checkpoint_restart_s", "", ""),
    ("SIGSTOP until heard", "hang_detect_s", "", "", ""),
    ("  and on, the survivors", "hang_recover_s", "", "", ""),
)
_STORES = (
    ("no root, mesh up", "rootless"),
    ("no root, cold", "rootless_cold"),
    ("TCPStore, server up", "tcpstore"),
    ("TCPStore, racing", "tcpstore_racing"),
)
_OTHERS = (
    ("imports of 4 ranks, no library, warm", "plain_import_warm_s", "s CPU"),
    ("  cold", "plain_import_cold_s", "s CPU"),
    ("first batch after a restart", "first_batch_after_restart_s", "s"),
    ("  data pipeline built anew", "first_batch_rebuilt_s", "s"),
    ("state from a peer", "peer_restore_gbps", "GB/s"),
    ("  bare send of as much", "bare_send_gbps", "GB/s"),
)


def show(console: Console, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what was measured; what was not, or does not apply, is left out or empty."""
    table = _table("Seconds from the fault to the next step", "fault, ranks counted", _NAMES)
    for label, *keys in _FAULTS:
        _row(table, label, keys, [_cell(found, key) for key in keys])
    _print(console, table)
    spent = [(name, found[f"stage {name}"]) for name in STAGES if f"stage {name}" in found]
    if spent:
        line = ", ".join(f"{name} {value['median']:.2f}" for name, value in spent)
        console.print(f"from a disk checkpoint: {line}")
    sizes = [f"{size} ranks" for size in SIZES]
    table = _table("Forming a process group, milliseconds", "store", sizes)
    for label, kind in _STORES:
        keys = [f"{kind}_init_{size}_s" for size in SIZES]
        _row(table, label, keys, [_cell(found, key, 1000, 1) for key in keys])
    _print(console, table)
    table = _table("While nothing fails, and on the way back", "what", ["value"])
    for label, key, unit in _OTHERS:
        value = _cell(found, key, digits=4 if unit == "s" else 2)
        _row(table, label, [key], [f"{value} {unit}" if value else ""])
    cost = found.get("step_overhead", {})
    if cost.get("median") is not None:
        low, high = cost["interval"]
        text = f"{cost['median']:+.2%} (95 %: {low:+.2%} to {high:+.2%})"
        table.add_row("a step under the library", text)
    for label, key in (
        ("  processor time of it", "step_cpu_us"),
        ("    of the main thread", "step_cpu_main_us"),
        ("    of the mesh's thread", "step_cpu_mesh_us"),
        ("  an update's begin and end", "step_update_us"),
        ("  an empty update, caches warm", "step_warm_us"),
    ):
        _row(table, label, [key], [_in(found, key, "µs", 1)])
    share = _in(found, "digest_overhead", "% of the time", 100)
    _row(table, "  comparing replicas", ["digest_overhead"], [share])
    _print(console, table)


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _row(table: Table, label: str, keys: Sequence[str], cells: Sequence[str]) -> None:
    """Add a row, if there is anything in it."""
    if any(cells):
        table.add_row(
            label, *("–" if not key else cell for key, cell in zip(keys, cells, strict=True))
        )


def _print(console: Console, table: Table) -> None:
    if table.row_count:
        console.print(table)


def _in(found: Mapping[str, Mapping[str, Any]], key: str, unit: str, scale: float) -> str:
    value = _cell(found, key, scale, digits=1 if scale == 1 else 3)
    return f"{value} {unit}" if value else ""


def _cell(
    found: Mapping[str, Mapping[str, Any]], key: str, scale: float = 1, digits: int = 2
) -> str:
    value = found.get(key, {})
    if value.get("median") is None:
        return "failed" if value.get("failed") else ""
    return f"{value['median'] * scale:.{digits}f} ({value['n']})"
