"""The kinds of faults around a supervised srun."""

from __future__ import annotations

import enum
from typing import NamedTuple


class ResumeFault(enum.StrEnum):
    """The kinds of faults."""

    NODE_DIES = "a node loses its power"
    NODE_CUT = "a node loses its network"
    NODE_SICK = "a node is marked sick"
    NODE_EATS = "tasks crash on a node, and no check sees why"
    SLURMD_AWAY = "a task crashes on a node whose slurmd is away for a while"
    TASK_CRASHES = "a task gets a signal"
    TASKS_HANG = "tasks on a node hang in the kernel"
    SLURM_AWAY = "slurmctld is away"
    SLURM_LOSES = "answers of Slurm are lost"
    SLURM_REFUSES = "Slurm refuses changes"
    SLURM_SLOW = "answers of Slurm come late"
    SRESCTLD_AWAY = "sresctld is away"
    INTERRUPT = "a person presses Ctrl-C once"
    INTERRUPT_TWICE = "a person presses Ctrl-C twice"
    TERMINATE = "a person sends SIGTERM"
    CANCEL_STEP = "a person cancels the step"
    CANCEL_NEAR_LOSS = "a person cancels the step around the loss of one of its nodes"
    CANCEL_JOB = "a person cancels the job"
    REQUEUE_JOB = "a person requeues the job"
    JOB_SHRUNK = "a person takes a node out of the job"
    JOB_PREEMPTED = "Slurm preempts the job"
    JOB_HELD = "a person holds the job, and releases it later"
    SRUN_DIES = "srun is killed, and not its tasks"
    SUPERVISOR_DIES = "the supervisor is killed, and its job with it"
    SUPERVISOR_ALONE_DIES = "the supervisor is killed, and its job goes on without it"
    COMPANION_CANCELLED = "a person cancels the companion"
    COMPANION_NODE_DIES = "a node of the companion loses its power"
    LENT_PREEMPTED = "Slurm preempts a companion of an elastic step"
    LENT_AT_LIMIT = "a companion of an elastic step reaches its time limit"
    LENT_REQUEUED = "a person requeues a companion of an elastic step, and releases it later"
    LENT_HELD = "a person holds a companion of an elastic step that waits, and releases it later"
    LENT_SUSPENDED = "a companion of an elastic step is suspended for a while"
    LENT_RESIZED = "a person gives a companion of an elastic step another number of nodes"
    LENT_RENAMED = "a person gives a companion of an elastic step another name"
    LENT_STEP_CANCELLED = "a person cancels a step of a companion of an elastic step"
    LENT_NODE_SICK = "a node of a companion of an elastic step is marked sick"
    RESIZED = "a person wants an elastic step to have another number of nodes"
    SUPERVISOR_STOPPED = "the supervisor is stopped for a while"


OF_LENT_JOBS = (
    ResumeFault.LENT_PREEMPTED,
    ResumeFault.LENT_AT_LIMIT,
    ResumeFault.LENT_REQUEUED,
    ResumeFault.LENT_HELD,
    ResumeFault.LENT_SUSPENDED,
    ResumeFault.LENT_RESIZED,
    ResumeFault.LENT_RENAMED,
    ResumeFault.LENT_STEP_CANCELLED,
)
"""Deeds of Slurm, or of a person by its commands, on a companion of an elastic job."""


class PlannedResumeFault(NamedTuple):
    """One fault of a run."""

    at: float
    kind: ResumeFault
    node: int
    seconds: float
