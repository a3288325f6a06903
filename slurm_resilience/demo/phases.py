"""From three logs (journal, supervisor, training) to the phases of one recovery. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Fault = Literal["power", "xid", "admin", "rank"]
NAMES = (
    "detected",
    "marked",
    "step_ended",
    "nodes_ready",
    "relaunched",
    "first_step",
    "node_back",
)
NOT_IN_RANK = frozenset({"marked", "nodes_ready", "node_back"})
"""A killed rank leaves every node healthy."""


class Account(msgspec.Struct, frozen=True):
    """The figures of one run."""

    phases: dict[str, float | None]
    """Seconds since the fault; None: not (yet) seen, or not part of this fault."""
    last_step: int
    """The last step done before the fault took effect."""
    resumed_from: int
    """The checkpoint from which training went on."""
    caught_up: float | None
    """Seconds since the fault until ``last_step`` was done again, or the first step beyond it."""
    loss_before: float | None
    loss_after: float | None
    """Loss of the same step, before and after; None: it came right behind a checkpoint, and no step
    was lost."""
    token: str = ""
    """The attempt that went on."""

    @property
    def steps_lost(self) -> int:
        return max(0, self.last_step - self.resumed_from)


def account(
    fault: Fault,
    at: float,
    node: str,
    journal: Sequence[dict[str, Any]],
    supervisor: Sequence[dict[str, Any]],
    training: Sequence[dict[str, Any]],
) -> Account:
    """Put the logs together.

    Args:
        fault: which fault was made.
        at: when, seconds since the epoch.
        node: the node it was made on.
        journal: sresctld's events, any order.
        supervisor: its events (`SRES_EVENTS`), oldest first.
        training: one entry a step: ``at``, ``step``, ``loss``, ``token``.
    """
    of_node = sorted(
        (e for e in journal if e["node"] == node and e["at"] >= at), key=lambda e: e["at"]
    )
    ours = [e for e in supervisor if e["at"] >= at]
    times = {
        "detected": _first(of_node, "requested" if fault == "admin" else "detected", "kind"),
        "marked": _first(of_node, "marked", "kind"),
        "step_ended": _first(ours, "step_ended", "event"),
        "nodes_ready": _first(ours, "nodes_ready", "event"),
        "relaunched": _first(ours, "started", "event"),
        "node_back": _first(of_node, "closed", "kind"),
    }
    before = [e for e in training if e["at"] < (times["relaunched"] or float("inf"))]
    tokens = {e["token"] for e in before if e["at"] < at}
    after = [e for e in training if e["at"] > at and e["token"] not in tokens]
    before = [e for e in before if e["token"] in tokens]
    times["first_step"] = after[0]["at"] if after else None
    if fault == "rank":
        times["detected"] = times["step_ended"]
    elif fault == "admin":
        # The administrator's own command is the mark.
        times["marked"] = times["marked"] or times["detected"]
    if times["nodes_ready"] is None and fault != "rank":
        # A requeued job has its nodes when its script runs again.
        times["nodes_ready"] = times["relaunched"]
    last = before[-1] if before else None
    resumed_from = after[0]["step"] - 1 if after else 0
    is_lost = last is not None and last["step"] > resumed_from
    again = next((e for e in after if not is_lost or (last and e["step"] == last["step"])), None)
    return Account(
        phases={
            name: None
            if (value := times[name]) is None or (fault == "rank" and name in NOT_IN_RANK)
            else round(value - at, 3)
            for name in NAMES
        },
        last_step=last["step"] if last else 0,
        resumed_from=resumed_from,
        caught_up=round(again["at"] - at, 3) if again else None,
        loss_before=last["loss"] if last and is_lost else None,
        loss_after=again["loss"] if again and is_lost else None,
        token=after[0]["token"] if after else "",
    )


def complete(found: Account, fault: Fault) -> bool:
    """Tell whether everything that this fault brings has been seen."""
    absent = NOT_IN_RANK if fault == "rank" else frozenset()
    return all(found.phases[name] is not None for name in NAMES if name not in absent)


def _first(events: Sequence[dict[str, Any]], name: str, key: str) -> float | None:
    return next((float(e["at"]) for e in events if e[key] == name), None)
