"""The rules of a simulated cluster, by name, and the record of a broken one."""

from __future__ import annotations

import enum
from typing import NamedTuple


class ClusterRule(enum.StrEnum):
    """The rules."""

    UNSUPERVISED_JOB = "no job that is not supervised dies by sresctld sooner than by Slurm"
    ENDED_JOB = "no job is ended but a supervised one that can never run anything again"
    LIVING_NODE = "no node that lives and is healthy is replaced, unless a person asked for it"
    PERSONS_NODE = "no node of a person is touched"
    ONCE = "no intent acts twice"
    LIVING_DOWN = "no node that beats or answers probes is set DOWN as dead"
    MOST_PROGRAMS = "no more programs run than replace.max_running, and …_partition, allow"
    MOST_MARKS = "no more nodes are marked within the window than the ceiling allows"
    PROGRAM_ENDED = "no running program is ended without a person's word"
    SICK_IN_SERVICE = "no node stays in service with a finding that takes it out"
    RESUMED_SICK = "no node is given back with a finding of its present boot"
    UNCHECKED = "no node is given back before its sresd has run its checks in this boot"
    DEAD_UNNOTICED = "no dead node stays in service"
    REBOOTING_NODE = "no node is replaced before a reboot by hand had its time (replace.silent_for)"
    INTENT_ENDS = "each intent ends within a bound of time"
    AS_IT_SHOULD_BE = "after the last fault the cluster comes to the state that it should have"
    ALARMS = "alarms are no flood"
    DAEMON_LIVES = "the daemon ends by itself for no fault"
    GRES = "no job with GRES is made smaller: Slurm could not make it larger again"
    QUEUE_JUMP = "no job goes before the queue for more nodes than it lost to faults"
    NOT_ITS_OWN = "no user speaks for a node or for another user's job, or orders anything"
    HALT = "nothing is begun after a pause or SIGTERM"
    RESET = "GPUs are reset while no job is on their node, and once for each order"
    SHORT_DISK = "no replacement is begun and no try is counted while sresctld's disk is short"
    LEMON = "no machine is repaired again and again without a person (recovery.max_repairs)"
    DURATIONS = "no duration is written down that has not passed"
    YOUNG_ROWS = "nothing is dropped from the journal before its time (controller.keep)"
    OTHERS_RESERVATION = (
        "no reservation is touched but sresctld's own, and none that a person changed"
    )
    POOL_SIZE = "no pool of spares is larger than configured, and none has two reservations"
    POOL_FULL = "a pool of spares is full again in time when nodes are idle"
    GIVEN_ONCE = (
        "each spare is given to one job that lacks a node, and to no other, for a short time"
    )
    KEPT = "what a requeued job has left is kept for it alone, for a bounded time, until it runs"
    ONE_DAEMON = "of two sresctld on one state directory only one works"


class Broken(NamedTuple):
    """A rule that was broken, when, and by what."""

    rule: ClusterRule
    at: float
    text: str
