"""From the lines that the ranks left to the figures of the table. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SIZES = (4, 16, 32)
OURS = (
    "exception_all_s",
    "exception_after_backward_p99_s",
    "exception_after_backward_hsdp_p99_s",
    "sigkill_survivors_s",
    "sigkill_all_cold_s",
    "sigkill_all_warm_s",
    "hang_detect_s",
    "hang_recover_s",
    *(
        f"{store}_init_{n}_s"
        for store in ("rootless", "tcpstore", "tcpstore_racing")
        for n in SIZES
    ),
    "first_batch_after_restart_s",
    "first_batch_rebuilt_s",
    "peer_restore_gbps",
    "bare_send_gbps",
    "step_overhead",
    "step_cpu_us",
    "step_cpu_main_us",
    "step_cpu_mesh_us",
    "step_update_us",
    "step_warm_us",
    "digest_overhead",
    "checkpoint_restart_s",
    "plain_sigkill_warm_s",
    "plain_sigkill_cold_s",
    "plain_import_warm_s",
    "plain_import_cold_s",
)
RIVALS = (
    "torchrun_exception_all_s",
    "torchrun_sigkill_all_s",
    "nvrx_exception_all_s",
    "nvrx_sigkill_survivors_s",
    "torchft_sigkill_survivors_s",
    "torchft_sigkill_all_s",
)
KEYS = OURS + RIVALS
STAGES = ("detect and stop", "start processes", "init group", "build, load, data", "first step")


class Event(NamedTuple):
    """One line of a rank's file."""

    at: float
    """Seconds on CLOCK_MONOTONIC, which all processes of a machine share."""
    name: str
    step: int
    world: int
    pid: int


def parse(text: str) -> list[Event]:
    """Read a rank's file; a last line that is being written is left out."""
    found = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            at, name, step, world, pid = line.split()
            found.append(Event(float(at), name, int(step), int(world), int(pid)))
    return found


def recovered(events: Iterable[Event], fault: float, world: int = 0) -> float | None:
    """When a rank completed its first step in a group that was formed after the fault.

    A survivor may still finish the step that was on its way; that is no recovery.

    Args:
        events: one rank's, of all processes that sat on it.
        fault: when the fault was injected.
        world: ranks that the group must have; 0: any number.
    """
    formed = 0
    for event in events:
        if event.at <= fault:
            continue
        if event.name == "form":
            formed = event.pid if world in (0, event.world) else 0
        elif event.name == "step" and event.pid == formed:
            return event.at
    return None


def downtime(
    ranks: Mapping[int, Iterable[Event]], fault: float, counted: Iterable[int], world: int = 0
) -> float | None:
    """Seconds from the fault until every counted rank has recovered; None: not all have."""
    ends = [recovered(ranks.get(rank, ()), fault, world) for rank in counted]
    done = [end for end in ends if end is not None]
    return max(done) - fault if done and len(done) == len(ends) else None


def stages(ranks: Mapping[int, Iterable[Event]], fault: float) -> dict[str, float] | None:
    """Return the seconds that a restart from the checkpoint spends in each stage; None: it is not
    over.

    A stage ends when the last rank has left it; the first one, when the first new process runs.
    """
    firsts: dict[str, list[float]] = {"start": [], "imported": [], "form": [], "loaded": []}
    for events in ranks.values():
        later = [event for event in events if event.at > fault]
        for name, times in firsts.items():
            times.extend([event.at for event in later if event.name == name][:1])
    ends = [recovered(events, fault) for events in ranks.values()]
    if any(len(times) < len(ranks) for times in firsts.values()) or None in ends:
        return None
    marks = [fault, min(firsts["start"]), *(max(firsts[n]) for n in ("imported", "form", "loaded"))]
    marks.append(max(end for end in ends if end is not None))
    return {name: marks[n + 1] - marks[n] for n, name in enumerate(STAGES)}


def past(ranks: Mapping[int, Iterable[Event]], counted: Iterable[int], step: int) -> bool:
    """Tell whether all these ranks have completed a step of this number."""
    return all(
        any(event.name == "step" and event.step >= step for event in ranks.get(rank, ()))
        for rank in counted
    )


def recoveries(
    ranks: Mapping[int, Sequence[Event]], victim: int, counted: Sequence[int]
) -> list[float]:
    """Seconds from each fault of a rank until every counted rank has recovered.

    Raises:
        ValueError: a rank has had more than one process, or has not recovered.
    """
    for rank in counted:
        if len({event.pid for event in ranks[rank]}) > 1:
            raise ValueError(f"rank {rank} was replaced")
    found = []
    for fault in [event.at for event in ranks[victim] if event.name == "fault"]:
        took = downtime(ranks, fault, counted, len(counted))
        if took is None:
            raise ValueError(f"no recovery from the fault at {fault:.3f}")
        found.append(took)
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """Return the least value that so many of them do not exceed; at least one value."""
    found = sorted(values)
    return found[max(0, math.ceil(share * len(found)) - 1)]


def extra(pairs: Sequence[tuple[float, float]], steps: int) -> dict[str, Any]:
    """Return microseconds of a step beyond those without the library: the median of turns.

    Args:
        pairs: processor seconds without and with the library, of turns that belong together.
        steps: of a turn.
    """
    return summary((ours - plain) / steps * 1e6 for plain, ours in pairs)


def summary(values: Iterable[float]) -> dict[str, Any]:
    """Median, n, extremes and the values themselves."""
    found = sorted(values)
    if not found:
        return {"median": None, "n": 0, "values": []}
    return {
        "median": statistics.median(found),
        "n": len(found),
        "min": found[0],
        "max": found[-1],
        "values": found,
    }


def overhead(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the median of the pairs' ratios minus 1, and how far it may be off (bootstrap, 95 %).

    Args:
        pairs: seconds without and with the library, of turns that belong together.
    """
    chance = random.Random(0)
    resampled = sorted(_excess(chance.choices(pairs, k=len(pairs))) for _ in range(1000))
    return {
        "median": _excess(pairs),
        "n": len(pairs),
        "interval": [resampled[25], resampled[974]],
        "values": [ours / plain - 1 for plain, ours in pairs],
    }


def _excess(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(ours / plain for plain, ours in pairs) - 1
