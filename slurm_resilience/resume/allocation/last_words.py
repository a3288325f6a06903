"""Keep sresctld's last word on each node, for a time in which sresctld cannot be asked.

Until SlurmdTimeout is over, Slurm gives out a node that is dead. A word on a node holds until Slurm
has seen by itself that the node is out of service, or shows that it has booted since: then Slurm
gives out what it knows to be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_resilience.model import Node

SAME_BOOT_SECONDS = 30.0
"""slurmd works its boot out anew at each start, to about a second."""


class LastWords:
    """The nodes that were faulty by sresctld's last word."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._boots: dict[str, str] = {}
        """BootTime of each node before its word, as far as it was read."""

    def keep(self, node: str, reason: str) -> None:
        """Keep the word on a node that is faulty."""
        self._reasons[node] = reason

    def forget(self, node: str) -> None:
        """Forget the word: the node is sound, or another machine has its name now."""
        self._reasons.pop(node, None)

    def see(self, nodes: Iterable[Node]) -> None:
        """Forget the words on nodes of which Slurm knows more by now."""
        for node in nodes:
            before = self._boots.get(node.name, "")
            if not node.is_available or _has_booted(before, node.boot_time):
                self.forget(node.name)
            if node.name not in self._reasons:
                self._boots[node.name] = node.boot_time

    def on(self, nodes: Iterable[str]) -> Mapping[str, str]:
        """Return those of some nodes that were faulty, with the reason."""
        return {name: self._reasons[name] for name in nodes if name in self._reasons}


def _has_booted(before: str, shown: str) -> bool:
    """Return whether Slurm shows a later boot; not where either is unknown."""
    if not before or shown == before:
        return False
    # Late: no step waits for it to start.
    from datetime import datetime

    try:
        passed = datetime.fromisoformat(shown) - datetime.fromisoformat(before)
    except ValueError:
        return False
    return passed.total_seconds() > SAME_BOOT_SECONDS
