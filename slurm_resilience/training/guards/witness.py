"""Decide what follows when replicas differ that should be equal. Pure.

Where a strict majority of the replicas agrees (so at least two of three), the others are wrong, and
are healed from it. Where none does (two replicas), either may be right: all ranks go back to a
state that is certified, if there is a copy of one.

A state is certified by a comparison that finds all replicas equal. Parameters are compared, and the
optimizer's own tensors show in them one step later, so a comparison after step s certifies the
whole state up to step s - 1.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from slurm_resilience.mesh.model import View

MOST_IN_A_ROW = 3
"""Corrections without a comparison in between, at a later step, that found all replicas equal. Then
it is the program that makes them differ, and that is only told."""
SHOWN = 3
"""Names, or ranks, in a line."""
MOST_IN_ALL = 10
"""Corrections of a process's life. A chip that flips bits more often needs a person."""


class Correction(enum.Enum):
    """The answer to replicas that differ."""

    TELL = "it is told, and nothing else"
    HEAL = "the ranks that differ are healed from the others"
    GO_BACK = "all ranks go back to a certified state"


class ReplicaFault(NamedTuple):
    """Replicas that differ."""

    step: int
    """Committed steps."""
    ranks: tuple[int, ...]
    """Those that differ from most; where none is in the majority, from the lowest rank."""
    names: tuple[str, ...]
    """Names of the parameters that differ there."""
    is_outvoted: bool
    """A strict majority of the replicas of each part agrees."""
    only_parameters: bool
    """Nothing else differs, such as an optimizer's options: that is no flipped bit."""
    certified: int = -1
    """The certified step that all ranks have a copy of; -1: none."""


def is_outvoted(sums: Sequence[int], replica_size: int) -> bool:
    """Tell whether each part of the model has one checksum that most of its replicas have.

    Args:
        sums: the checksum of each rank.
        replica_size: ranks that hold one copy of the model together.
    """
    parts = [Counter(sums[part::replica_size]) for part in range(replica_size)]
    return all(2 * max(part.values()) > part.total() for part in parts)


def correction_line(fault: ReplicaFault, correction: Correction, view: View) -> str:
    """Say what is done about a fault, in one line that names the nodes."""
    members = [view.members[rank].peer for rank in fault.ranks]
    who = ", ".join(f"seat {peer.seat} ({peer.node})" for peer in members[:SHOWN])
    more = f" and {len(members) - SHOWN} more" if len(members) > SHOWN else ""
    what = ", ".join(fault.names[:SHOWN])
    differ = f"step {fault.step}: {who}{more} differs from the other replicas in {what}"
    if correction is Correction.HEAL:
        return f"{differ}, and is healed from them"
    return f"{differ}; no majority says which is right: all go back to step {fault.certified}"


class Witness:
    """The memory of one process: what was certified, and how often something was corrected."""

    def __init__(self) -> None:
        self.certified = -1
        """The last step whose whole state was equal on all replicas; -1: none yet."""
        self._last = -1
        """Step of the last fault that was corrected."""
        self._in_a_row = self._in_all = 0

    def agreed(self, step: int) -> None:
        """Note that all replicas were equal after so many steps."""
        self.certified = max(self.certified, step - 1)
        if step > self._last:
            self._in_a_row = 0

    def healed(self, step: int) -> None:
        """Note the step that this process was brought to: what comes after it is done anew."""
        self.certified = min(self.certified, step)

    def judge(self, fault: ReplicaFault) -> Correction:
        """Decide, and count it."""
        if not fault.only_parameters:
            return Correction.TELL
        if self._in_a_row >= MOST_IN_A_ROW or self._in_all >= MOST_IN_ALL:
            return Correction.TELL
        if not fault.is_outvoted and fault.certified < 0:
            return Correction.TELL
        self._in_a_row += 1
        self._in_all += 1
        self._last = max(self._last, fault.step)
        return Correction.HEAL if fault.is_outvoted else Correction.GO_BACK
