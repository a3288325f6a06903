"""The making of a simulated run whose job is preempted, from its seed."""

from __future__ import annotations

import enum
from collections.abc import Collection
from random import Random
from typing import NamedTuple

from slurm_resilience.simulate.resume.resume_fault import PlannedResumeFault, ResumeFault

PREEMPTED_SEED = 5_000_000_000
"""Runs from this seed on are of a job that Slurm preempts."""
OLDER, NEWER = "22.05.8", "24.11.5"
"""Releases of Slurm: for the older one a job that ends within its GraceTime is over."""
GRACE_SECONDS = (0.0, 5.0, 20.0, 60.0, 300.0)
"""GraceTimes of the job's partition."""
REQUEUE_SHARE, NEWER_SHARE = 0.8, 0.35
"""Runs with PreemptMode=REQUEUE, and those with a newer Slurm."""
FIRST_SECONDS, FURTHER_SECONDS = (2.0, 600.0), (100.0, 2000.0)
"""When the job is preempted, and how long after that once more."""
FURTHER_SHARE = 0.3
OTHERS_SECONDS = (5.0, 900.0)
"""Another job has the nodes then for so long."""
NEAR_SHARE, NEAR_SECONDS = 0.6, 10.0
"""Runs with faults around a preemption, and how long before it or after its end they may come."""
CALM_SHARE = 0.5
"""Runs without faults at other times."""


class PreemptMode(enum.Enum):
    """Slurm's settings for a job that must leave its nodes."""

    REQUEUE = "it runs again"
    CANCEL = "it is over"


class LastDeed(enum.Enum):
    """The program's answers to Slurm's word that its tasks are to end."""

    SAVES = "it saves its work, and ends by the signal"
    LEAVES = "it saves its work, and ends with 0"
    FAILS = "it ends with a code of its own"
    STAYS = "it goes on until it is killed"


class PreemptionDraw(NamedTuple):
    """All that a run has of its own whose job is preempted."""

    mode: PreemptMode
    release: str
    """Slurm's."""
    grace_seconds: float
    deed: LastDeed
    faults: tuple[PlannedResumeFault, ...]
    is_calm: bool
    """No faults happen but these."""


def draw_preemption(seed: int, kinds: Collection[ResumeFault]) -> PreemptionDraw:
    """Return what a run is about.

    Args:
        seed: of the run.
        kinds: faults that may happen around a preemption.
    """
    random = Random(f"preemption {seed}")
    grace = random.choice(GRACE_SECONDS)
    begins = [random.uniform(*FIRST_SECONDS)]
    while random.random() < FURTHER_SHARE:
        begins.append(begins[-1] + random.uniform(*FURTHER_SECONDS))
    faults = [
        PlannedResumeFault(at, ResumeFault.JOB_PREEMPTED, 0, random.uniform(*OTHERS_SECONDS))
        for at in begins
    ]
    chosen = sorted({*kinds, ResumeFault.JOB_HELD})
    near = random.randint(1, 2) if random.random() < NEAR_SHARE else 0
    for _ in range(near):
        at = random.choice(begins) + random.uniform(-NEAR_SECONDS, grace + NEAR_SECONDS)
        seconds = random.uniform(5.0, 400.0)
        kind = random.choice(chosen)
        faults.append(PlannedResumeFault(max(0.0, at), kind, random.randrange(100), seconds))
    return PreemptionDraw(
        PreemptMode.REQUEUE if random.random() < REQUEUE_SHARE else PreemptMode.CANCEL,
        NEWER if random.random() < NEWER_SHARE else OLDER,
        grace,
        random.choice((LastDeed.SAVES, *LastDeed)),
        tuple(faults),
        random.random() < CALM_SHARE,
    )
