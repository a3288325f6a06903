"""From the ranks' own logs to what a checkpointless run showed. Pure.

A line says ``what``: ``took`` (a rank took its share of a step's samples), ``done`` (the step is
committed on this rank), ``end`` (with a digest of the parameters).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

Line = dict[str, Any]
NAMES = (
    "detected",
    "marked",
    "survivors_step",
    "node_idle",
    "step_started",
    "joined",
    "node_back",
)


class DemoOutcome(msgspec.Struct, frozen=True):
    """Tell whether it was the same training as an undisturbed one."""

    problems: tuple[str, ...]
    """Empty: each sample once, and all replicas equal."""
    steps: int
    """Committed steps."""
    loss: float
    """The loss of the last step, over the global batch."""


def phases(
    at: float,
    node: str,
    seats: Sequence[int],
    journal: Sequence[Line],
    supervisor: Sequence[Line],
    training: Sequence[Line],
) -> dict[str, float | None]:
    """Seconds since the fault; None: not (yet) seen.

    Args:
        at: the fault, seconds since the epoch.
        node: where.
        seats: that it took away.
        journal: sresctld's events, any order.
        supervisor: its events (`SRES_EVENTS`), oldest first.
        training: the ranks' lines, any order.
    """
    of_node = sorted(
        (e for e in journal if e["node"] == node and e["at"] >= at), key=lambda e: e["at"]
    )
    ours = [e for e in supervisor if e["at"] >= at]
    full = max((line["world"] for line in training), default=0)
    before = max((line["generation"] for line in training if line["at"] < at), default=0)
    done = [x for x in training if x["what"] == "done" and x["generation"] > before]
    smaller = [x["at"] for x in done if x["world"] < full]
    back = [x["at"] for x in done if x["world"] == full and x["seat"] in seats]
    found = {
        "detected": _first(of_node, "kind", "detected"),
        "marked": _first(of_node, "kind", "marked"),
        "survivors_step": min(smaller, default=None),
        "node_idle": _first(ours, "event", "nodes_ready"),
        "step_started": _first(ours, "event", "joining"),
        "joined": min(back, default=None),
        "node_back": _first(of_node, "kind", "closed"),
    }
    return {name: None if when is None else round(when - at, 3) for name, when in found.items()}


def verdict(training: Sequence[Line], steps: int, global_batch: int) -> DemoOutcome:
    """Check the books.

    Args:
        training: the ranks' lines, any order.
        steps: optimizer steps of the run.
        global_batch: samples of one step.
    """
    took: dict[tuple[int, int], list[int]] = defaultdict(list)
    worlds: dict[int, set[int]] = defaultdict(set)
    losses: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for line in training:
        if line["what"] == "took":
            took[line["step"], line["generation"]] += line["samples"]
        elif line["what"] == "done":
            worlds[line["step"]].add(line["generation"])
            losses[line["step"]].append((line["loss"], line["share"]))
    problems = []
    seen: set[int] = set()
    for step in range(1, steps + 1):
        if len(worlds[step]) != 1:
            problems.append(f"step {step} was committed in {len(worlds[step])} worlds")
            continue
        (generation,) = worlds[step]
        samples = took[step, generation]
        if len(samples) != global_batch or len(set(samples)) != global_batch:
            unique = len(set(samples))
            problems.append(f"step {step}: {len(samples)} samples, {unique} different")
        if seen & set(samples):
            problems.append(f"step {step}: {len(seen & set(samples))} samples a second time")
        seen |= set(samples)
    digests = {line["digest"] for line in training if line["what"] == "end"}
    if len(digests) != 1:
        problems.append(f"the replicas ended with {len(digests)} different states")
    shares = losses[steps]
    total = sum(share for _, share in shares)
    loss = sum(value * share for value, share in shares) / total if total else float("nan")
    return DemoOutcome(tuple(problems), sum(bool(worlds[s]) for s in range(1, steps + 1)), loss)


def _first(events: Sequence[Line], key: str, name: str) -> float | None:
    return next((float(e["at"]) for e in events if e[key] == name), None)
