"""The options of a run of deep checks. Pure."""

from __future__ import annotations

import msgspec


class DeepRunOptions(msgspec.Struct, frozen=True):
    """The order that `sres deepcheck run` was given."""

    only: tuple[str, ...] = ()
    seconds: float = 60.0
    """The time for which each load runs."""
    wait_seconds: float = 0.0
    """Busy nodes are waited for so long."""
    limit_minutes: int = 240
    """A level that takes longer is ended."""
    profile: str = ""
    threshold: float | None = None
    """Bus bandwidth that a pair or the whole has to reach, GB/s."""
    largest_bytes: int | None = None
    """The largest message; None: by the kind of node."""
    region: str = "unknown"
    node_log: str = ""
    set_aside: bool = False
    """Nodes that fail are taken out of service, as a person does to have them repaired."""
