"""The kinds of faults under which a rule is known to be broken, each with its reason.

A kind leaves this list as soon as sresctld bears it; the tests and the bench run all others.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_resilience.simulate.cluster.cluster_faults import FaultKind

NOT_BORNE: Mapping[FaultKind, str] = {
    FaultKind.LONG_BLIP: "a node is marked although jobs without a supervisor run on it",
    FaultKind.BEATS_AND_PROBES: "a node is marked although jobs without a supervisor run on it",
    FaultKind.NO_PROBES: "with its beats cut as well, a node that Slurm reaches is marked",
    FaultKind.FLAPPING: "a node that lives again is replaced while it waits for its turn",
    FaultKind.POWER: "a node is marked although jobs without a supervisor run on it",
    FaultKind.STORM_OF_BLIPS: "the breaker forgets, and each new name is a new alarm",
    FaultKind.STORM_OF_DEATHS: "the breaker forgets, and each new name is a new alarm",
    FaultKind.STORM_OF_FAULTS: "the breaker forgets, and each new name is a new alarm",
    FaultKind.SICK_REBOOT: "a finding between the resume and the close counts as dealt with",
    FaultKind.SICK_REPLACE: "a finding between the resume and the close counts as dealt with",
    FaultKind.PROGRAM_FAILS: "a node that lives again is replaced by the next try",
    FaultKind.PROGRAM_HANGS: "ReturnToService ends the program of a node that registers",
    FaultKind.PROGRAM_LIES: "ReturnToService ends the program of a node that registers",
    FaultKind.PROGRAM_HALF_DONE: "ReturnToService ends the program of a node that registers",
    FaultKind.PROGRAM_LOSES_NODE: "ReturnToService ends the program of a node that registers",
    FaultKind.PROGRAM_SLOW: "a node that registers before its sresd speaks is found dead",
    FaultKind.PROGRAM_SICK: "a node that comes back sick is given back",
    FaultKind.CLOCK_STEP: "a program that runs is taken for lost, and a second one is started",
    FaultKind.UNLISTED: "a node that was missing from one listing is not watched any more",
    FaultKind.DISK_JOURNAL: "a pause that cannot be written is lost",
    FaultKind.PERSON_REBOOTS: "a reboot outside Slurm looks like a death, and is replaced",
    FaultKind.PERSON_WRITES_LIKE_SLURM: "such a reason is taken for Slurm's own",
    FaultKind.PERSON_RESERVES: "a reservation does not keep a node that is in hand from its repair",
}

KINDS: tuple[FaultKind, ...] = tuple(kind for kind in FaultKind if kind not in NOT_BORNE)
"""The kinds that sresctld bears."""
