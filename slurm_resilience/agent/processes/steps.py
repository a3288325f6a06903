"""Find the job steps that run on this node, as the process table shows them.

Slurm cannot be asked here: this is for a node that reaches no other machine.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import psutil

from slurm_resilience.agent.processes.process_reader import ProcessReader, ProcessTexts
from slurm_resilience.slurm.companion_job import COMPANION_JOB

TOKEN = "SRES_TOKEN"
"""Set in every task of an attempt that auto-resume started: the job asked for it."""
SUPERVISOR = "sres-resume"
STEPD = re.compile(r"slurmstepd: \[([0-9]+)(?:\+[0-9]+)?\.([A-Za-z0-9]+)\]")
"""slurmstepd's title, e.g. ``slurmstepd: [12.0]``, ``[12.batch]``; ``[12+1.0]`` in a het job."""
NODE_NAME, JOB_ID, STEP_ID = "SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_STEP_ID"
_GROUP = re.compile(r"/job_([0-9]+)/step_([A-Za-z0-9]+)")
"""The control group that Slurm gives a step, where the site has it do so."""
_READER = ProcessReader()
"""One for all that ask: what hangs is to be found out once."""


@dataclass(frozen=True)
class LocalStep:
    """One step on this node."""

    job: int
    step: str
    has_token: bool = False
    """A task was started by auto-resume."""
    has_supervisor: bool = False
    """The supervisor of its job runs in it."""
    members: tuple[psutil.Process, ...] = field(default=(), compare=False)
    """Its processes, slurmstepd itself not among them."""
    unreadable: tuple[psutil.Process, ...] = field(default=(), compare=False)
    """Those of them that hang in the kernel: whether they have a token cannot be read."""

    @property
    def id(self) -> str:
        return f"{self.job}.{self.step}"


def asked_for(
    steps: Iterable[LocalStep], known: Collection[str] = frozenset()
) -> tuple[LocalStep, ...]:
    """Return the steps that may be ended when the node is cut off. Pure.

    Those that auto-resume started, and the batch script of the same job: it would start another
    attempt. Other sruns of the job, and jobs that did not ask, are not ours to touch.

    Args:
        steps: of this node.
        known: steps that an earlier look found to have been started by auto-resume. They count
            where processes hang by now, so that it cannot be read again.
    """
    steps = tuple(steps)
    ours = {s.id for s in steps if s.has_token or (s.unreadable and s.id in known)}
    jobs = {step.job for step in steps if step.id in ours or step.has_supervisor}
    return tuple(s for s in steps if s.id in ours or (s.step == "batch" and s.job in jobs))


def running(node: str) -> tuple[LocalStep, ...]:
    """Find all steps of this node.

    Args:
        node: the node's name; where several slurmds share a machine, the others' are left out.
    """
    texts = read_texts(psutil.process_iter())
    steps, strays = [], _strays(texts)
    for process, text in texts.texts.items():
        # The title replaces the command line. Any user can set one, so it has to be root's: a user
        # must not speak for another user's job.
        title = STEPD.match(text.title)
        with contextlib.suppress(psutil.Error):
            if title and process.uids().real in (0, os.geteuid()) and _here(process):
                job, step = int(title[1]), title[2]
                seen = _look(process, job, step, node, texts, strays.get((title[1], step), ()))
                steps += [seen] if seen else []
    return tuple(steps)


def read_texts(processes: Iterable[psutil.Process]) -> ProcessTexts:
    """Read what tells a process's job and step."""
    return _READER.read(processes, (TOKEN, COMPANION_JOB, NODE_NAME, JOB_ID, STEP_ID))


def group_of(process: psutil.Process) -> tuple[str, str]:
    """Return the job and the step in whose control group a process is; empty: in none.

    No process can hold this up, whatever it hangs in.
    """
    if not _here(process):
        return "", ""
    with contextlib.suppress(OSError):
        match = _GROUP.search(Path(f"/proc/{process.pid}/cgroup").read_text("utf-8", "replace"))
        return (match[1], match[2]) if match else ("", "")
    return "", ""


def _here(process: psutil.Process) -> bool:
    """Tell whether a process is in our own process table.

    A container or a lab on this machine has a slurmd of its own, with a node that may well have the
    same name as ours.
    """
    try:
        theirs = Path(f"/proc/{process.pid}/ns/pid").stat().st_ino
    except OSError:
        return False
    return theirs == Path("/proc/self/ns/pid").stat().st_ino


def _look(
    stepd: psutil.Process,
    job: int,
    step: str,
    node: str,
    texts: ProcessTexts,
    strays: Sequence[psutil.Process],
) -> LocalStep | None:
    """Return one step; None when it belongs to another slurmd of this machine."""
    members = stepd.children(recursive=True)
    environments = [texts.of(member).variables for member in members]
    if any(env.get(NODE_NAME, node) != node for env in environments):
        return None
    token = step not in ("batch", "extern") and any(TOKEN in env for env in environments)
    supervisor = any(_is_supervisor(texts.of(member).title) for member in members)
    if token:
        member_pids = {member.pid for member in members}
        owners = {member.uids().real for member in members}
        members += [p for p in strays if p.pid not in member_pids and p.uids().real in owners]
    unreadable = tuple(member for member in members if member in texts.unreadable)
    return LocalStep(job, step, token, supervisor, tuple(members), unreadable)


def end(step: LocalStep, grace: float) -> int:
    """End a step's processes: SIGTERM, then SIGKILL after ``grace`` seconds.

    slurmstepd is left: it sees its tasks end, cleans up and tells slurmctld when it can.

    Returns:
        The number of processes that had to be killed.
    """
    _signal(step.members, terminate=True)
    _, alive = psutil.wait_procs(step.members, timeout=grace)
    _signal(alive, terminate=False)
    return len(alive)


def _signal(processes: Sequence[psutil.Process], terminate: bool) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # gone already; psutil checks against pid reuse
            if terminate:
                process.terminate()
            else:
                process.kill()


def _strays(texts: ProcessTexts) -> dict[tuple[str, str], list[psutil.Process]]:
    """Return the processes with a token by job and step: some leave their slurmstepd (daemonised
    helpers). One that cannot be read is where its control group is."""
    by_step: dict[tuple[str, str], list[psutil.Process]] = {}
    for process, text in texts.texts.items():
        env = text.variables
        if TOKEN in env:
            # A task in a companion allocation is told of the main job.
            key = (env.get(COMPANION_JOB) or env.get(JOB_ID, ""), env.get(STEP_ID, ""))
            by_step.setdefault(key, []).append(process)
    for process in texts.unreadable:
        by_step.setdefault(group_of(process), []).append(process)
    return by_step


def _is_supervisor(title: str) -> bool:
    return any(PurePath(word).name == SUPERVISOR for word in title.split(" "))
