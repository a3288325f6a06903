"""End what jobs left behind on this node: Slurm drains a node whose tasks it cannot end.

A process belongs to a job of this node if its environment says so, and if it descends from a
slurmstepd of root's or is a user's. Other processes of root's stay: a system service that was
restarted from within a job has such an environment too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from slurm_resilience.agent.processes.process_reader import ProcessTexts
from slurm_resilience.agent.processes.steps import JOB_ID, NODE_NAME, STEPD, group_of, read_texts
from slurm_resilience.wire.messages import LeftOverEnded

GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
GONE_SECONDS = 10.0
"""Until what was killed, and its slurmstepd, must be gone."""
MAX_NAMED = 20
"""Processes that are named in an answer."""


def end_left_over(node: str, living: Collection[int]) -> LeftOverEnded:
    """End the processes of all jobs but the living ones, and look whether they are gone.

    Args:
        node: this node's name; where several slurmds share a machine, the others' are left alone.
        living: jobs that are not over.
    """
    texts = read_texts(psutil.process_iter())
    found = list(_members(node, living, texts))
    names = {process: _in_words(process) for process in found}
    daemons = list(
        dict.fromkeys(above for process in found for above in _daemons_of(process, texts))
    )
    for process in found:
        with contextlib.suppress(psutil.Error):  # psutil checks against pid reuse
            process.terminate()
    _, alive = psutil.wait_procs(found, timeout=GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs([*alive, *daemons], timeout=GONE_SECONDS)
    left = [names[process] for process in found if _lives(process)]
    left += [_in_words(process) for process in daemons if _lives(process)]
    # Those that were born meanwhile, by what was being ended.
    texts = read_texts(psutil.process_iter())
    born = (new for new in _members(node, living, texts) if new not in names)
    left += [_in_words(new) for new in born if _lives(new)]
    left += [
        f"{_in_words(process)}: it hangs, and its job cannot be read"
        for process in texts.unreadable
        if process not in names and _may_be_left(process, living) and _lives(process)
    ]
    ended = [name for process, name in names.items() if not _lives(process)]
    return LeftOverEnded(tuple(ended[:MAX_NAMED]), tuple(left[:MAX_NAMED]))


def _members(node: str, living: Collection[int], texts: ProcessTexts) -> Iterator[psutil.Process]:
    """Find the processes of jobs that are over."""
    for process, text in texts.texts.items():
        with contextlib.suppress(psutil.Error):
            job = text.variables.get(JOB_ID, "")
            if text.variables.get(NODE_NAME) != node or not job.isdecimal():
                continue
            is_users = process.uids().real != 0
            if int(job) not in living and (is_users or _daemons_of(process, texts)):
                yield process
    for process in texts.unreadable:
        # Slurm's control group tells the job where the process itself does not.
        job, _ = group_of(process)
        if job and int(job) not in living:
            yield process


def _may_be_left(process: psutil.Process, living: Collection[int]) -> bool:
    """Tell whether a process that cannot be read may be that of a job that is over: a user's, in no
    living job's control group."""
    with contextlib.suppress(psutil.Error):
        job, _ = group_of(process)
        return process.uids().real != 0 and not (job and int(job) in living)
    return False


def _daemons_of(process: psutil.Process, texts: ProcessTexts) -> list[psutil.Process]:
    """Return the slurmstepd that a process descends from. Any user can set such a title, so it has
    to be root's."""
    found = []
    with contextlib.suppress(psutil.Error):
        for above in process.parents():
            is_daemon = STEPD.match(texts.of(above).title) is not None
            if is_daemon and above.uids().real in (0, os.geteuid()):
                found.append(above)
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _in_words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        # Not psutil's name(): for a long one it reads the command line, which may hang.
        name = Path(f"/proc/{process.pid}/comm").read_text("utf-8", "replace").strip()
        return f"{process.pid} {name} ({process.username()}, {process.status()})"
    return str(process.pid)
