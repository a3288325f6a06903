"""Connections of this Lustre client to its servers: the state of each import.

Watched, never acted on: a server that is away is away for all nodes. FULL is connected; IDLE is a
connection that the client has closed because no program used it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOTS = ("/proc/fs/lustre", "/sys/kernel/debug/lustre", "/sys/fs/lustre")
"""The places in older and newer releases."""
CONNECTED = frozenset({"FULL", "IDLE"})
_STATE = re.compile(r"^\s*state:\s*(\w+)", re.M)


class LustreImport(NamedTuple):
    name: str
    state: str


def _files(context: CheckContext) -> Iterator[Path]:
    for root in ROOTS:
        yield from sorted(context.path(root).glob("*/*/import"))


def absent(context: CheckContext) -> str:
    return "" if any(True for _ in _files(context)) else "no Lustre client"


def probe(context: CheckContext) -> tuple[LustreImport, ...]:
    found: dict[str, LustreImport] = {}
    for file in _files(context):
        try:
            state = _STATE.search(file.read_text("utf-8", "replace"))
        except OSError:
            continue  # it has been unmounted meanwhile
        if state is not None:
            found.setdefault(file.parent.name, LustreImport(file.parent.name, state[1]))
    return tuple(found.values())


def judge(seen: tuple[LustreImport, ...], context: CheckContext) -> Judgement:
    findings = tuple(
        Finding(
            CHECK.name,
            Severity.MONITOR,
            f"{one.name} is not connected: {one.state}",
            context.now,
            subject=one.name,
        )
        for one in seen
        if one.state not in CONNECTED
    )
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen)} connections to Lustre's servers stand", findings)


CHECK = Check(
    "lustre_imports",
    probe,
    judge,
    period=60.0,
    in_child=True,
    absent=absent,
    source="{" + ",".join(ROOTS) + "}/*/*/import",
    threshold="a state other than FULL and IDLE",
    asks_for=(Severity.MONITOR,),
)
