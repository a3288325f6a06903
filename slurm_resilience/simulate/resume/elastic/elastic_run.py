"""The making of a simulated run of an elastic step, from its seed."""

from __future__ import annotations

import dataclasses
from random import Random

import msgspec

from slurm_resilience.config import ElasticSettings
from slurm_resilience.simulate.resume.elastic.growth_faults import OF_GROWTH
from slurm_resilience.simulate.resume.preemption.preemption_draw import PREEMPTED_SEED
from slurm_resilience.simulate.resume.resume_fault import PlannedResumeFault, ResumeFault
from slurm_resilience.simulate.resume.resume_state import SiteSettings, TrainedProgram

ELASTIC_SEED = 4_000_000_000
"""Runs from this seed on are of an elastic step."""
CALM_SHARE, HANDS_SHARE = 0.2, 0.4
"""Runs in which nodes become free and are taken back, and nothing else happens; and those in which
things happen to companions alone."""
SHRUNK_SHARE = 0.3
"""Those of the latter in which a person takes a node out of the job."""
MOST_FAULTS = 8
WORK_SECONDS = (600.0, 4000.0)
ABSENCE_SECONDS = (6.0, 4000.0)
LIMITED_SHARE = 0.3
"""Runs in which only some sizes are allowed."""
OF_COMPANIONS = (
    *OF_GROWTH,
    ResumeFault.COMPANION_CANCELLED,
    ResumeFault.COMPANION_NODE_DIES,
    ResumeFault.SLURM_AWAY,
    ResumeFault.SLURM_LOSES,
    ResumeFault.SLURM_REFUSES,
    ResumeFault.SLURM_SLOW,
    ResumeFault.SRESCTLD_AWAY,
)


class ElasticDraw(msgspec.Struct, frozen=True):
    """All that an elastic run has of its own."""

    core: int
    """Nodes of the job."""
    free: int
    """Nodes outside it."""
    words: tuple[str, ...]
    """Options of srun."""
    fewest: int
    """--auto-resume-min-nodes; 0: not given."""
    settings: ElasticSettings
    faults: list[PlannedResumeFault]
    is_calm: bool


def is_elastic(seed: int) -> bool:
    """Return whether a run is of an elastic step."""
    return ELASTIC_SEED <= seed < PREEMPTED_SEED


def draw_elastic(seed: int) -> ElasticDraw:
    """Return what a run is about.

    Args:
        seed: of the run.
    """
    random = Random(f"elastic {seed}")
    core, free = random.randint(1, 3), random.randint(1, 6)
    if random.random() < LIMITED_SHARE:
        more = sorted(random.sample(range(core + 1, core + 6), random.randint(1, 3)))
        less = [random.randint(1, core - 1)] if core > 1 and random.random() < 0.5 else []
        words = [f"--auto-resume-sizes={','.join(map(str, (*less, core, *more)))}"]
    else:
        step = random.choice((1, 1, 2))
        words = [f"--auto-resume-max-nodes={core + step * random.randint(1, 3)}"]
        words += [f"--auto-resume-step-nodes={step}"] if step > 1 else []
    kind = random.random()
    is_calm = kind < CALM_SHARE
    kinds = sorted(OF_COMPANIONS if kind < CALM_SHARE + HANDS_SHARE else _ALL)
    last = WORK_SECONDS[1] * random.uniform(0.1, 0.8)
    count = 0 if is_calm else random.randint(1, MOST_FAULTS)
    faults = [
        _lasting(
            random,
            PlannedResumeFault(
                random.uniform(0.0, last),
                random.choice(kinds),
                random.randrange(100),
                random.uniform(5.0, 400.0),
            ),
        )
        for _ in range(count)
    ]
    # Drawn apart, so that the other runs are the same as ever. Where the job loses nodes besides,
    # no rule tells which of them it may replace.
    of_shrinking = Random(f"shrinking {seed}")
    is_shrunk = of_shrinking.random() < SHRUNK_SHARE
    if is_shrunk and CALM_SHARE <= kind < CALM_SHARE + HANDS_SHARE and core > 1:
        at = of_shrinking.uniform(30.0, last)
        faults.append(PlannedResumeFault(at, ResumeFault.JOB_SHRUNK, core - 1, 9.0))
    return ElasticDraw(
        core,
        free,
        tuple(words),
        random.choice((0, 0, max(1, core - 1))),
        ElasticSettings(timeout=random.choice((120.0, 600.0))),
        faults,
        is_calm,
    )


_ALL = (
    *OF_COMPANIONS,
    ResumeFault.NODE_DIES,
    ResumeFault.NODE_CUT,
    ResumeFault.NODE_SICK,
    ResumeFault.NODE_EATS,
    ResumeFault.SLURMD_AWAY,
    ResumeFault.TASK_CRASHES,
    ResumeFault.TASKS_HANG,
    ResumeFault.TERMINATE,
    ResumeFault.CANCEL_STEP,
    ResumeFault.CANCEL_JOB,
    ResumeFault.REQUEUE_JOB,
    ResumeFault.SRUN_DIES,
    ResumeFault.SUPERVISOR_DIES,
    ResumeFault.SUPERVISOR_ALONE_DIES,
)


def _lasting(random: Random, fault: PlannedResumeFault) -> PlannedResumeFault:
    """Give a fault another length: absences are of all lengths."""
    if fault.kind is not ResumeFault.SUPERVISOR_STOPPED:
        return fault
    shortest, longest = ABSENCE_SECONDS
    return fault._replace(seconds=shortest * (longest / shortest) ** random.random())


def make_elastic(site: SiteSettings, seed: int) -> SiteSettings:
    """Return the same site with a program that runs for long, and has no bug of its own."""
    random = Random(f"elastic program {seed}")
    program: TrainedProgram = dataclasses.replace(
        site.program,
        work_seconds=random.uniform(*WORK_SECONDS),
        fails_at=None,
        fails_in_work=None,
        crashes=0.0 if draw_elastic(seed).is_calm else site.program.crashes,
    )
    return dataclasses.replace(site, program=program)
