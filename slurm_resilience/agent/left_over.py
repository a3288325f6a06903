"""End what jobs left behind on this node: Slurm drains a node whose tasks it cannot end.

A process belongs to a job of this node if its environment says so, and if it descends from a
slurmstepd of root's or is a user's. Other processes of root's stay: a system service that was
restarted from within a job has such an environment too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

import psutil

from slurm_resilience.agent.steps import STEPD
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
    found = list(_members(node, living))
    names = {process: _in_words(process) for process in found}
    daemons = list(dict.fromkeys(above for process in found for above in _daemons_of(process)))
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
    left += [_in_words(new) for new in _members(node, living) if new not in names and _lives(new)]
    ended = [name for process, name in names.items() if not _lives(process)]
    return LeftOverEnded(tuple(ended[:MAX_NAMED]), tuple(left[:MAX_NAMED]))


def _members(node: str, living: Collection[int]) -> Iterator[psutil.Process]:
    """Find the processes of jobs that are over."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            job = environment.get("SLURM_JOB_ID", "")
            if environment.get("SLURMD_NODENAME") != node or not job.isdecimal():
                continue
            is_users = process.uids().real != 0
            if int(job) not in living and (is_users or _daemons_of(process)):
                yield process


def _daemons_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the slurmstepd that a process descends from. Any user can set such a title, so it has
    to be root's."""
    found = []
    with contextlib.suppress(psutil.Error):
        for above in process.parents():
            is_daemon = STEPD.match(" ".join(above.cmdline())) is not None
            if is_daemon and above.uids().real in (0, os.geteuid()):
                found.append(above)
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _in_words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.name()} ({process.username()}, {process.status()})"
    return str(process.pid)
