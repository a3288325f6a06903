"""States of the processes, for two checks: those stuck in the kernel, and the dead ones."""

from __future__ import annotations

from typing import NamedTuple

from slurm_resilience.health.check import CheckContext, Unjudged


class ProcessInState(NamedTuple):
    """One process that waits in the kernel, or is dead and not collected."""

    pid: int
    started: int
    """Ticks since the node booted: a pid is used again."""
    name: str
    state: str


def read_states(context: CheckContext, state: str) -> tuple[ProcessInState, ...]:
    """Return the processes in one state (`D`, `Z`)."""
    proc = context.path("/proc")
    if not proc.is_dir():
        raise Unjudged("/proc cannot be read")
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text("utf-8", "replace")
        except OSError:
            continue  # it has ended meanwhile
        # The name stands in brackets, and may itself hold some.
        head, _, tail = text.rpartition(") ")
        fields = tail.split()
        if len(fields) > 19 and fields[0] == state:
            name = head.partition("(")[2]
            found.append(ProcessInState(int(folder.name), int(fields[19]), name, state))
    return tuple(sorted(found))
