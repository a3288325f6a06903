"""The kinds of faults under which a rule is known to be broken, each with its reason.

A kind leaves this list as soon as sresctld bears it; the tests and the bench run all others.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_resilience.simulate.cluster.cluster_faults import FaultKind

NOT_BORNE: Mapping[FaultKind, str] = {
    FaultKind.PERSON_PUTS_BACK: (
        "a finding that a person answers by a resume is marked once more in the same cycle"
    ),
}

KINDS: tuple[FaultKind, ...] = tuple(kind for kind in FaultKind if kind not in NOT_BORNE)
"""The kinds that sresctld bears."""
