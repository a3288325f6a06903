"""Xids that are most often a program's, correlated by GPU over jobs and users. Pure.

One program that faults says nothing of its GPU. The same GPU under different programs of different
users does: then it is named, so that a person or a deep check looks at it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

APPLICATION_CODES = frozenset({"11", "13", "31", "32", "43", "45", "68", "69", "94"})
WINDOW_SECONDS = 7 * 86400.0
MIN_JOBS, MIN_USERS = 4, 3
"""Different jobs and users on one GPU. Jobs of one GPU often get the first one of a node, so two
users with a bug are no sign yet."""
MAX_EVENTS = 1000
"""Remembered of one node."""


class AppXid(msgspec.Struct, frozen=True):
    """One Xid of a program, with the job that it came from."""

    gpu: str
    """The GPU's serial number or UUID; its address where neither is known."""
    code: str
    job: int
    user: int
    at: float
    """Seconds since the epoch."""


class SuspectGpu(msgspec.Struct, frozen=True):
    """A GPU on which programs of different users fault."""

    gpu: str
    jobs: tuple[int, ...]
    users: int
    codes: tuple[str, ...]
    at: float

    @property
    def text(self) -> str:
        return (
            f"GPU {self.gpu}: Xid {', '.join(self.codes)} in {len(self.jobs)} jobs of {self.users} "
            "users within a week, and on no other GPU of these jobs: rather the GPU than programs"
        )


def remembered(events: Iterable[AppXid], now: float) -> tuple[AppXid, ...]:
    """Return those that count still, the latest last.

    Args:
        events: in any order.
        now: seconds since the epoch; what lies in its future came from a wrong clock.
    """
    counting = [one for one in events if now - WINDOW_SECONDS < one.at <= now]
    return tuple(sorted(counting, key=lambda one: one.at)[-MAX_EVENTS:])


def suspect_gpus(events: Iterable[AppXid], now: float) -> tuple[SuspectGpu, ...]:
    """Return the GPUs that are rather at fault than the programs on them.

    Args:
        events: of one node.
        now: seconds since the epoch.
    """
    counting = remembered(events, now)
    gpus_of: defaultdict[int, set[str]] = defaultdict(set)
    for one in counting:
        gpus_of[one.job].add(one.gpu)
    by_gpu: defaultdict[str, list[AppXid]] = defaultdict(list)
    for one in counting:
        # A program with a bug faults on every GPU that it has.
        if len(gpus_of[one.job]) == 1:
            by_gpu[one.gpu].append(one)
    found = []
    for gpu, seen in by_gpu.items():
        jobs, users = {one.job for one in seen}, {one.user for one in seen}
        if len(jobs) >= MIN_JOBS and len(users) >= MIN_USERS:
            codes = sorted({one.code for one in seen}, key=int)
            found.append(
                SuspectGpu(gpu, tuple(sorted(jobs)), len(users), tuple(codes), seen[-1].at)
            )
    return tuple(found)
