"""A companion: a second, small allocation beside a job that Slurm cannot grow. Pure.

Its name says whose it is, and of which run and supervisor of that job:
`sres-companion-of-12.0-4711`; with `-lent` behind it where an elastic step grows by it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from slurm_resilience.model import Job

_NAME = r"sres-companion-of-(?P<job>\d{1,10})\.(?P<restarts>\d{1,10})-(?P<supervisor>\d{1,10})"
_LENT = "-lent"
_GRES_KIND = r"^gres[:/]"
_HOLDING = ("RUNNING", "SUSPENDED", "COMPLETING")
"""States of a job that has its nodes."""
COMPANION_JOB = "SRES_COMPANION_JOB"
"""The allocation that a task really runs in, where that is not the main job."""
LOOK_SECONDS = 5
"""Between two looks of a companion at its job."""
UNUSED_SECONDS = 300
"""A companion in which no step runs for so long ends itself. The supervisor's longest pause between
two attempts is two minutes."""
LENT_UNUSED_SECONDS = 60
"""The same for one by which an elastic step grows: it is given back between two attempts. So its
supervisor was killed, and others want the nodes."""
_COMES_BY_ITSELF = ("", "None", "Priority", "Resources", "BeginTime", "Cleaning", "Prolog")
_BEHIND_OTHERS = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority"
"""So slurmctld words it, too, where all its nodes are for waiting jobs of other partitions."""
_MEMORY = {
    "SLURM_MEM_PER_NODE": "mem",
    "SLURM_MEM_PER_CPU": "mem-per-cpu",
    "SLURM_MEM_PER_GPU": "mem-per-gpu",
}
"""By these sbatch and salloc tell which memory the job has asked for."""

_SCRIPT = """\
#!/bin/sh
# Holds nodes for job {job} in place of lost ones, and gives them back when they are not needed.
# The user's own PATH may lead to another squeue, or to no sleep.
export PATH={commands}:/usr/bin:/bin:"$PATH"
# By the machine's own seconds: its date may be set, on or back, by hours.
used=$(cut -d. -f1 /proc/uptime)
pause=0
# It looks at once: a request that its job has left in the queue holds no node.
while sleep $pause; do
    pause={look}
    now=$(cut -d. -f1 /proc/uptime)
    if ! shown=$(squeue -a -r -h -j {job} -O JobID:16,State:16,RestartCnt:12 2>&1); then
        case $shown in
        *"Invalid job id"*) exit 0 ;;
        esac
        # Slurm does not answer: nothing is known, and nothing is done.
        used=$now
        continue
    fi
    running='(RUNNING|SUSPENDED|STOPPED|SIGNALING|RESIZING|CONFIGURING|STAGE_OUT)'
    printf '%s\\n' "$shown" | grep -Eq "^ *{job} +$running +{restarts} *\\$" || exit 0
    if ! steps=$(scontrol show step "$SLURM_JOB_ID" -o 2>&1); then
        steps=
    fi
    case $steps in
    *StepId="$SLURM_JOB_ID".[0-9]*) used=$now ;;
    esac
    [ $((now - used)) -le {unused} ] || exit 0
done
"""


class CompanionRequest(msgspec.Struct, frozen=True):
    """Nodes that a job wants beside its own."""

    job: Job
    """The main job; its excluded nodes are not taken."""
    nodes: int
    supervisor: int
    """Process number of the supervisor that asks."""
    per_node: tuple[str, ...] = ()
    """sbatch's words for the memory and GPUs of each node; none: what the partition gives."""
    lent: bool = False
    """An elastic step grows by it: it is not in place of nodes that the job has lost."""


class FoundCompanion(NamedTuple):
    """A companion as its name tells of it."""

    id: int
    job: int
    """The main job."""
    restarts: int
    """Requeues of the main job when it was asked for."""
    supervisor: int
    lent: bool = False
    """An elastic step grows by it."""
    waits_for: str = ""
    """Slurm's word for what it waits for; `None`, or empty, where it does not."""

    @property
    def needs_a_person(self) -> bool:
        """It waits for something else than its turn and free nodes, which may never come."""
        return needs_a_person(self.waits_for)


def needs_a_person(reason: str) -> bool:
    """Return whether a job waits for something else than its turn and free nodes.

    Args:
        reason: Slurm's word for it; `None`, or empty, where it does not wait.
    """
    own = reason.strip()
    return own not in _COMES_BY_ITSELF and not own.startswith(_BEHIND_OTHERS)


def companion_name(job: int, restarts: int, supervisor: int, *, lent: bool = False) -> str:
    """Return the name of a job's companions.

    Args:
        job: the main job.
        restarts: its requeues so far.
        supervisor: process number of the supervisor that asks.
        lent: an elastic step grows by it.
    """
    return f"sres-companion-of-{job}.{restarts}-{supervisor}{_LENT if lent else ''}"


def name_of_companion(job: Job) -> str:
    """Return the name of a job that is a companion; empty: it is none."""
    if job.companion_of is None:
        return ""
    number, restarts = job.companion_of
    return companion_name(number, restarts, job.companion_supervisor, lent=job.is_lent)


def is_companion(found: Job, of: Job, supervisor: int) -> bool:
    """Return whether a job is a companion that a supervisor has asked for in the job's present run.
    Another one may have its number by now: a slurmctld that was killed forgets the jobs of its last
    seconds.

    Args:
        found: as squeue shows it.
        of: the main job.
        supervisor: its process number.
    """
    # By its name, which another user may give to a job as well.
    own = (of.uid, (of.id, of.restarts), supervisor)
    return (found.uid, found.companion_of, found.companion_supervisor) == own


def companion_of(number: int, name: str, waits_for: str = "") -> FoundCompanion | None:
    """Return what a job's name tells; None: it is no companion's.

    Args:
        number: of the job.
        name: of the job.
        waits_for: Slurm's word for what it waits for.
    """
    own = name.strip()
    match = re.fullmatch(_NAME, own.removesuffix(_LENT))
    if match is None:
        return None
    return FoundCompanion(
        number,
        int(match["job"]),
        int(match["restarts"]),
        int(match["supervisor"]),
        own.endswith(_LENT),
        waits_for,
    )


def with_companions(jobs: Mapping[int, Job]) -> dict[int, Job]:
    """Return the jobs, each with the nodes of its companions.

    A companion belongs to a job of the same user that runs, and has been requeued as often as its
    name says; another one is taken for a job like any other.
    """
    known = dict(jobs)
    for job in jobs.values():
        if job.companion_of is None:
            continue
        number, restarts = job.companion_of
        main = known.get(number)
        if main is None or (main.uid, main.restarts) != (job.uid, restarts):
            known[job.id] = msgspec.structs.replace(job, companion_of=None)
        elif main.state in _HOLDING and job.state in _HOLDING:
            nodes = (*main.companion_nodes, *job.nodes)
            known[number] = msgspec.structs.replace(main, companion_nodes=nodes)
    return known


def companion_script(job: int, restarts: int, commands: str, *, lent: bool = False) -> str:
    """Return the batch script of a companion: it ends when its job does, or no longer uses it.

    Args:
        job: the main job.
        restarts: its requeues so far.
        commands: directory of Slurm's commands.
        lent: an elastic step grows by it.
    """
    unused, own = LENT_UNUSED_SECONDS if lent else UNUSED_SECONDS, shlex.quote(commands)
    return _SCRIPT.format(
        job=job, restarts=restarts, commands=own, look=LOOK_SECONDS, unused=unused
    )


def per_node_words(environment: Mapping[str, str], job: Job) -> tuple[str, ...]:
    """Return sbatch's words for the memory that the job itself has asked for, and for GPUs that it
    has asked for on all nodes together: squeue does not show these.

    Args:
        environment: of its batch script.
        job: as squeue shows it.
    """
    memory = tuple(
        f"--{option}={environment[name]}"
        for name, option in _MEMORY.items()
        if environment.get(name, "").isdecimal()
    )
    kind, colon, total = environment.get("SLURM_GPUS", "").rpartition(":")
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    if job.gres or not (total.isdecimal() and nodes.isdecimal() and int(nodes)):
        return memory
    # Rounded up: a node without one would be none of use.
    return (*memory, f"--gpus-per-node={kind}{colon}{-(-int(total) // int(nodes))}")


def companion_words(request: CompanionRequest) -> list[str]:
    """Return sbatch's options for a companion, but for those that Slurm alone knows."""
    job = request.job
    name = companion_name(job.id, job.restarts, request.supervisor, lent=request.lent)
    # Without --no-kill: where one of several nodes dies, the others are given back, and asked for
    # again with its replacement. Else the companion would go on without its script, which ends it.
    words = ["--parsable", f"--nodes={request.nodes}", "--exclusive", "--no-requeue"]
    words += [f"--job-name={name}", f"--comment=companion-of={job.id}", f"--time={_limit(job)}"]
    words += ["--output=/dev/null", "--chdir=/", *request.per_node]
    words += [f"--gres={re.sub(_GRES_KIND, '', job.gres)}"] if job.gres else []
    words += [f"--partition={job.partition}"] if job.partition else []
    words += [f"--account={job.account}"] if job.account else []
    words += [f"--qos={job.qos}"] if job.qos else []
    words += [f"--reservation={job.reservation}"] if job.reservation else []
    return words


def _limit(job: Job) -> str:
    """Return the rest of the job's time, in minutes: Slurm counts in whole ones."""
    left = job.seconds_left
    return "UNLIMITED" if left is None else str(max(1, math.ceil(left / 60)))
