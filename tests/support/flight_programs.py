"""Programs of ranks that call collectives, run until they hang, and their Flight Recorder dumps.

The semantics are those of NCCL and gloo: a rank goes on from a collective when all members of the
group have called the same number of it, and a fault changes what one rank calls.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One call of the program, by every member of its group."""

    group: int
    operation: str = "all_reduce"
    size: int = 8
    kind: str = "Float"


class Fault(NamedTuple):
    """The trouble of one rank."""

    rank: int
    at: int
    """The number of the step among its own."""
    what: str
    """hang, skip, size, type, operation."""


class Ran(NamedTuple):
    """The calls of one rank, oldest first: group, number, step, and whether it is over."""

    calls: list[tuple[int, int, Step, bool]]


def steps_of(
    rank: int, program: Sequence[Step], groups: Sequence[Sequence[int]], fault: Fault | None
) -> list[Step]:
    """Return what a rank would call."""
    steps = [step for step in program if rank in groups[step.group]]
    if fault is None or fault.rank != rank or fault.at >= len(steps):
        return steps
    wrong = steps[fault.at]
    changed = {
        "hang": [],
        "skip": steps[fault.at + 1 :],
        "size": [wrong._replace(size=wrong.size + 1), *steps[fault.at + 1 :]],
        "type": [wrong._replace(kind="Half"), *steps[fault.at + 1 :]],
        "operation": [wrong._replace(operation="barrier"), *steps[fault.at + 1 :]],
    }
    return [*steps[: fault.at], *changed[fault.what]]


def run(
    program: Sequence[Step],
    groups: Sequence[Sequence[int]],
    fault: Fault | None = None,
    ahead: int = 1,
) -> dict[int, Ran]:
    """Let all ranks go as far as they come.

    Args:
        program: in the order of every rank.
        groups: the ranks of each group.
        fault: of one rank.
        ahead: calls that a rank makes before it waits for the first of them (1: as gloo does;
            NCCL's calls return at once).
    """
    ranks = sorted({rank for members in groups for rank in members})
    plans = {rank: steps_of(rank, program, groups, fault) for rank in ranks}
    called: dict[int, list[tuple[int, int, Step]]] = {rank: [] for rank in ranks}
    entered = {(rank, group): 0 for group, members in enumerate(groups) for rank in members}
    rows: dict[tuple[int, int], dict[int, Step]] = {}

    def is_over(group: int, number: int) -> bool:
        row = rows.get((group, number), {})
        return len(row) == len(groups[group]) and len(set(row.values())) == 1

    goes_on = True
    while goes_on:
        goes_on = False
        for rank in ranks:
            calls = called[rank]
            is_open = sum(not is_over(group, number) for group, number, _ in calls)
            if len(calls) < len(plans[rank]) and is_open < ahead:
                step = plans[rank][len(calls)]
                entered[rank, step.group] += 1
                number = entered[rank, step.group]
                rows.setdefault((step.group, number), {})[rank] = step
                calls.append((step.group, number, step))
                goes_on = True
    return {
        rank: Ran([(group, number, step, is_over(group, number)) for group, number, step in calls])
        for rank, calls in called.items()
    }


def dump(
    ran: Ran,
    groups: Sequence[Sequence[int]],
    rank: int,
    backend: str = "nccl",
    kept: int = 2000,
) -> dict[str, Any]:
    """Return a rank's dump as torch 2.13 writes it: the newest ``kept`` calls."""
    entries = []
    for group, number, step, is_over in ran.calls[-kept:]:
        done = {"nccl": "completed" if is_over else "started", "gloo": "scheduled"}[backend]
        entries.append(
            {
                "record_id": len(entries),
                "pg_id": group,
                "process_group": (str(group), "default_pg" if group == 0 else f"group {group}"),
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "op_id": number,
                "profiling_name": f"{backend}:{step.operation}",
                "time_created_ns": 1795379004689346484 + number,
                "input_sizes": [[step.size]],
                "input_dtypes": [step.kind],
                "output_sizes": [[step.size]],
                "output_dtypes": [step.kind],
                "state": done,
                "retired": is_over,
                "timeout_ms": 600000,
                "is_p2p": False,
                "frames": [
                    {"name": "all_reduce", "filename": "/v/torch/distributed/c.py", "line": "1"},
                    {"name": "step", "filename": "train.py", "line": str(40 + group)},
                ],
            }
        )
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {
            str(at): {"name": str(at), "desc": "", "ranks": str(list(members))}
            for at, members in enumerate(groups)
            if rank in members
        },
        "pg_status": _status(ran),
    }


def _status(ran: Ran) -> dict[str, Any]:
    last: dict[int, int] = {}
    for group, number, _, _ in ran.calls:
        last[group] = number
    return {
        str(group): {
            "last_enqueued_collective": number,
            "last_started_collective": -1,
            "last_completed_collective": -1,
        }
        for group, number in last.items()
    }


def written(content: Mapping[str, Any], form: str) -> bytes:
    """Return a dump as a file holds it."""
    if form == "json":
        return json.dumps(content).encode()
    return pickle.dumps(content, protocol=int(form))
