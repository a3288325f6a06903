"""Compare what people did about a fault with what sresctld would have done. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from slurm_resilience.controller.journal.records import WOULD_REPLACE, ObservedFault

_OUTCOMES = (
    # The strongest act of people first.
    ("seen-machine", "replaced"),
    ("seen-boot", "rebooted"),
    ("seen-set-aside", "set aside by a person"),
    ("seen-in-service", "put back into service"),
    ("seen-well", "well again by itself"),
)


def review_view(fault: ObservedFault) -> dict[str, Any]:
    """Return a fault that was only observed as plain data, with what came of it.

    `agrees` is true where people replaced or booted what sresctld would have replaced, or let be
    what it would not have replaced; null while it is open.
    """
    outcome = outcome_of(fault)
    agrees: bool | None = None
    if fault.ended:
        would_repair = fault.would_at(WOULD_REPLACE) > 0
        agrees = would_repair == (outcome in ("replaced", "rebooted"))
    view: dict[str, Any] = msgspec.to_builtins(fault)
    del view["sight"]
    return view | {"outcome": outcome, "agrees": agrees}


def outcome_of(fault: ObservedFault) -> str:
    """Return the strongest thing that was done to the node; `open`: nothing yet."""
    seen = {remark.kind for remark in fault.then}
    known = next((text for kind, text in _OUTCOMES if kind in seen), "")
    return known or ("no longer followed" if fault.ended else "open")
