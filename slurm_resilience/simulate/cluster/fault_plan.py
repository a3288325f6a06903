"""The kinds of faults of a simulated cluster, and the plan of one run."""

from __future__ import annotations

import enum
from collections.abc import Collection
from random import Random
from typing import NamedTuple

BURST_SECONDS = 60.0
"""Faults of one burst happen within this time."""


class FaultKind(enum.StrEnum):
    """The kinds of faults, and of what people do."""

    BLIP = "a node is cut off for less than a silence is judged"
    LONG_BLIP = "a node is cut off for up to a minute"
    NO_BEATS = "a node's beats are cut off, its slurmd answers"
    NO_PROBES = "a node's slurmd cannot be probed, its beats arrive"
    NO_SLURM = "slurmctld does not reach a slurmd"
    BEATS_AND_PROBES = "a node is cut off from sresctld, slurmctld reaches it"
    STORM_OF_BLIPS = "many nodes are cut off within seconds"
    STORM_OF_DEATHS = "many nodes lose power within seconds"
    STORM_OF_FAULTS = "many nodes show a fault within seconds"
    POWER = "a node loses power"
    FLAPPING = "a node is cut off again and again"
    SICK_REBOOT = "a node shows a fault that a reboot mends"
    SICK_RESET = "a node shows a fault that a reset of the GPU mends, or does not"
    SICK_REPLACE = "a node shows a fault that comes back in each boot"
    LEMON = "a machine comes back from each repair, and fails again"
    AGENT_STOPS = "a sresd is stopped for an upgrade"
    AGENT_DIES = "a sresd dies and is started again"
    PROGRAM_FAILS = "a node dies, and the program fails"
    PROGRAM_HANGS = "a node dies, and the program hangs"
    PROGRAM_LIES = "a node dies, and the program does nothing and exits 0"
    PROGRAM_HALF_DONE = "a node dies, and the program fails half-way"
    PROGRAM_LOSES_NODE = "a node dies, and does not come back after the program"
    PROGRAM_SLOW = "a node dies, and comes back long after the program"
    PROGRAM_SICK = "a node is sick, and comes back sick"
    KILL = "kill -9 of sresctld at a write, a call or a start"
    STOP = "SIGTERM to sresctld at a write, a call or a start"
    SECOND_DAEMON = "a second sresctld is started on the same state directory"
    CLOCK_STEP = "the wall clock of sresctld's machine is stepped"
    SLURM_AWAY = "slurmctld does not answer"
    SLURM_SLOW = "slurmctld takes seconds for each call"
    SLURM_RESTART = "slurmctld is restarted"
    UNLISTED = "a node is missing from a listing"
    REASON_UNCLEAR = "reasons cannot be read for certain"
    PERSON_WRITES_LINES = "a person's reason has more lines, and the first one reads like a request"
    DISK_JOURNAL = "the journal's disk is full"
    DISK_RUNS = "the disk of the program's runs is full"
    RUNS_REMOVED = "a person removes the directories of the program's runs"
    PERSON_DRAINS = "a person drains a node"
    PERSON_PUTS_BACK = "a person drains a node, and puts it back minutes later"
    PERSON_RESUMES = "a person resumes a node that is out of service"
    PERSON_REWORDS = "a person changes the reason of a node in sresctld's hands"
    PERSON_WRITES_LIKE_SLURM = "a person's reason begins like one of Slurm's own"
    PERSON_ASKS = "a person asks for a replacement or a reboot"
    PERSON_RESERVES = "a person reserves a node for maintenance"
    PERSON_REBOOTS = "a person reboots a node outside Slurm"
    SCONTROL_REBOOT = "a person reboots a node by scontrol reboot"
    USER_LIES = "a user's program claims jobs, nodes and steps that are not its own"
    SPARES_EDITED = "a person changes the nodes of a reservation of spares"
    SPARES_LENT = "a person changes the users of a reservation of spares"
    SPARES_DELETED = "a person deletes a reservation of spares"
    SPARES_REFUSED = "Slurm refuses all changes of reservations"
    SPARES_UNANSWERED = "Slurm changes reservations, and its answers are lost"
    SPARES_QUEUE = "a full queue of other users' jobs, and a node that dies"
    SPARES_RESERVED = "a person reserves nodes for some time"
    PERSON_PAUSES = "a person pauses sresctld for some minutes"


SPARE_KINDS = frozenset(kind for kind in FaultKind if kind.name.startswith("SPARES_"))
"""Faults of a cluster that has pools of spares."""
KINDS_WITHOUT_SPARES = tuple(kind for kind in FaultKind if kind not in SPARE_KINDS)


class PlannedFault(NamedTuple):
    """A fault, its time, and the seed of all that is random in it."""

    at: float
    kind: FaultKind
    seed: str


def plan(
    seed: int, hours: float, a_hour: float, kinds: Collection[FaultKind]
) -> list[PlannedFault]:
    """Draw the faults of a run: in bursts, because what hurts comes together."""
    random = Random(f"{seed}/plan")
    # A lemon stands for some of the machines that are replaced: so a seed's other faults stay the
    # same with it and without it.
    lemon, reset, removed = FaultKind.LEMON, FaultKind.SICK_RESET, FaultKind.RUNS_REMOVED
    apart = SPARE_KINDS | {lemon, reset, removed, FaultKind.SCONTROL_REBOOT}
    ordered: list[FaultKind] = [kind for kind in FaultKind if kind in kinds and kind not in apart]
    lemons, resets = Random(f"{seed}/lemons"), Random(f"{seed}/resets")
    removals = Random(f"{seed}/removals")
    alone: list[FaultKind] = [kind for kind in (lemon, reset, removed) if kind in kinds]
    count = max(1, round(hours * a_hour))
    faults = _plan_spares(seed, hours, a_hour, kinds) + _plan_reboots(seed, hours, kinds)
    if not ordered and not alone:
        return sorted(faults)
    spared = len(faults)
    ordered, count = ordered or alone[:1], count + len(faults)
    while len(faults) < count:
        begin = 40.0 + random.random() * max(1.0, hours * 3600.0 - 100.0)
        for _ in range(min(random.choice((1, 2, 3)), count - len(faults))):
            at = begin + random.random() * BURST_SECONDS
            kind = random.choice(ordered)
            if kind is FaultKind.SICK_REPLACE and lemon in kinds and lemons.random() < 0.5:
                kind = lemon
            if kind is FaultKind.SICK_REBOOT and reset in kinds and resets.random() < 0.5:
                kind = reset
            if kind is FaultKind.DISK_RUNS and removed in kinds and removals.random() < 0.5:
                kind = removed
            faults.append(PlannedFault(at, kind, f"{seed}/{len(faults) - spared}"))
    return sorted(faults)


def _plan_spares(
    seed: int, hours: float, a_hour: float, kinds: Collection[FaultKind]
) -> list[PlannedFault]:
    """Draw the faults of spares by themselves: a seed's others stay the same without them."""
    random = Random(f"{seed}/spare-plan")
    ordered = [kind for kind in FaultKind if kind in kinds and kind in SPARE_KINDS]
    count = max(1, round(hours * a_hour / 2)) if ordered else 0
    return [
        PlannedFault(
            40.0 + random.random() * max(1.0, hours * 3600.0 - 100.0),
            random.choice(ordered),
            f"{seed}/spares/{number}",
        )
        for number in range(count)
    ]


def _plan_reboots(seed: int, hours: float, kinds: Collection[FaultKind]) -> list[PlannedFault]:
    """Draw the reboots that people ask of Slurm, by themselves as well."""
    if FaultKind.SCONTROL_REBOOT not in kinds:
        return []
    random = Random(f"{seed}/scontrol-reboots")
    return [
        PlannedFault(
            40.0 + random.random() * max(1.0, hours * 3600.0 - 100.0),
            FaultKind.SCONTROL_REBOOT,
            f"{seed}/scontrol-reboots/{number}",
        )
        for number in range(random.choice((0, 1, 2, 3)))
    ]
