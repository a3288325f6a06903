"""From the logs of one run to its phases, and from several runs to medians. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAMES = ("detected", "step_ended", "nodes_ready", "relaunched", "first_step")
Phases = dict[str, float | None]
Lines = Sequence[Mapping[str, Any]]
_DETECTED = ("noticed",)
_RELAUNCHED = ("started", "joining")


def has_recovered(training: Lines, at: float) -> bool:
    """Tell whether a process that did not train before the fault has made a step since."""
    return _first_step(training, at) is not None


def phases(
    at: float,
    journal: Lines,
    supervisor: Lines,
    training: Lines,
    *,
    seen_down: float | None = None,
    script_began: Sequence[float] = (),
) -> Phases:
    """Return the seconds from the fault to each phase; None: the rung has none, or tells of none.

    Args:
        at: the fault, seconds since the epoch.
        journal: sresctld's events.
        supervisor: its events, oldest first.
        training: a line for each step: `at`, `step`, `token`, `process`.
        seen_down: when Slurm was first seen to show the node down, where no sresctld says more.
        script_began: when the batch script began, each time.
    """
    found = sorted(float(e["at"]) for e in journal if e["kind"] == "detected" and e["at"] >= at)
    ours = [event for event in supervisor if event["at"] >= at]
    times = {
        "detected": _soonest((*found, *_times(ours, _DETECTED))) or seen_down,
        "step_ended": _soonest(_times(ours, ("step_ended",))),
        "nodes_ready": _soonest(_times(ours, ("nodes_ready",))),
        "relaunched": _soonest(_times(ours, _RELAUNCHED)),
        "first_step": _first_step(training, at),
    }
    again = _soonest(began for began in script_began if began > at)
    # A requeued job has its nodes when its script runs again.
    times["nodes_ready"] = times["nodes_ready"] or again
    times["relaunched"] = times["relaunched"] or again
    return {name: None if (when := times[name]) is None else round(when - at, 3) for name in NAMES}


def medians(runs: Sequence[Phases]) -> Phases:
    """Return each phase's median over the runs of one rung."""
    found: Phases = {}
    for name in NAMES:
        values = [value for run in runs if (value := run[name]) is not None]
        found[name] = round(statistics.median(values), 3) if values else None
    return found


def report(
    keys: Iterable[str], runs: Mapping[str, Sequence[Phases]], missing: Mapping[str, str]
) -> dict[str, Any]:
    """Return what `--json` writes.

    Args:
        keys: of the figures that are always there; null where nothing was measured.
        runs: of each rung, by its name.
        missing: rungs without a figure, and the reason.
    """
    found = {name: medians(of_rung) for name, of_rung in runs.items() if of_rung}
    return {
        **dict.fromkeys(keys),
        **{f"{name}_s": rung["first_step"] for name, rung in found.items()},
        "phases": found,
        "runs": {name: list(of_rung) for name, of_rung in runs.items()},
        "missing": dict(missing),
    }


def _first_step(training: Lines, at: float) -> float | None:
    before = {(line["token"], line["process"]) for line in training if line["at"] <= at}
    after = [
        float(line["at"])
        for line in training
        if line["at"] > at and (line["token"], line["process"]) not in before
    ]
    return min(after, default=None)


def _times(events: Lines, kinds: Sequence[str]) -> list[float]:
    return [float(event["at"]) for event in events if event["event"] in kinds]


def _soonest(times: Iterable[float]) -> float | None:
    return min(times, default=None)
