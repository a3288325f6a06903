"""Names of the directories, and the choice of those to remove. Pure.

``step-000123`` is a finished checkpoint: it got this name by one rename, after everything in it was
on the disk. ``step-000123.tmp-<token>`` is being written, or was when its writer died; it is
never read. The token says who writes: attempt, host, process, number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

ABANDONED_SECONDS = 3600.0
"""A directory in which nothing was written for this long is dead, also without a known writer."""

_DONE = re.compile(r"step-([0-9]{6,})")
_TEMPORARY = re.compile(r"step-([0-9]{6,})\.tmp-(.+)")
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]")


class SaveOwner(NamedTuple):
    """The writer of a temporary directory."""

    attempt: str
    """`slurm_resilience.resume.attempt.token()`; empty where nothing supervises."""
    host: str
    pid: int
    serial: str
    """Tells apart what one process writes."""


class Temporary(NamedTuple):
    """A temporary directory as it was found."""

    name: str
    quiet: float
    """Seconds since anything in it changed."""


def done(step: int) -> str:
    """Return the name of a finished checkpoint."""
    return f"step-{step:06d}"


def step_of(name: str) -> int:
    """Return the step of a finished checkpoint's name; -1 for any other name."""
    found = _DONE.fullmatch(name)
    return int(found[1]) if found and done(int(found[1])) == name else -1


def temporary(step: int, owner: SaveOwner) -> str:
    """Return the name of a directory that ``owner`` writes."""
    parts = (owner.attempt, owner.host, str(owner.pid), owner.serial)
    return f"{done(step)}.tmp-" + "_".join(_UNSAFE.sub("-", part) for part in parts)


def any_step(name: str) -> int:
    """Return the step of a finished or temporary name; 0 for any other."""
    found = _TEMPORARY.fullmatch(name)
    return int(found[1]) if found else max(step_of(name), 0)


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def owner_of(name: str) -> SaveOwner | None:
    """Return the writer of a directory; None when the name does not say."""
    found = _TEMPORARY.fullmatch(name)
    parts = found[2].split("_") if found else []
    if len(parts) != 4 or not parts[2].isdigit():
        return None
    return SaveOwner(parts[0], parts[1], int(parts[2]), parts[3])


def dead(
    found: Iterable[Temporary], me: SaveOwner, in_flight: Collection[str], alive: Collection[int]
) -> list[str]:
    """Return the temporary directories that no writer will finish.

    Only the valid attempt may ask: then any other attempt of its job is over. Of its own attempt,
    those go whose writer on this host has ended, those that this process itself gave up, and, as
    of other jobs, those in which nothing happened for `ABANDONED_SECONDS`.

    Args:
        found: what is there.
        me: this process.
        in_flight: names that this process is writing now.
        alive: process ids alive on this host.
    """
    me = me._replace(attempt=_UNSAFE.sub("-", me.attempt), host=_UNSAFE.sub("-", me.host))
    return [
        one.name
        for one in found
        if is_temporary(one.name)
        and one.name not in in_flight
        and (one.quiet > ABANDONED_SECONDS or _over(owner_of(one.name), me, alive))
    ]


def _over(owner: SaveOwner | None, me: SaveOwner, alive: Collection[int]) -> bool:
    if owner is None:
        return False
    if me.attempt and owner.attempt != me.attempt:
        return _job(owner.attempt) == _job(me.attempt)
    return owner.host == me.host and (owner.pid == me.pid or owner.pid not in alive)


def _job(attempt: str) -> str:
    """Return the job of an attempt's token."""
    return attempt.rpartition(".")[0].rpartition(".")[0]


def surplus(
    good: Iterable[int], bad: Iterable[int], keep: int, loading: Collection[int]
) -> list[int]:
    """Return steps whose checkpoints may be deleted.

    The newest ``keep`` good ones stay, and whatever is being loaded. A bad one goes only when all
    of those are newer: until then it may be all that is left of its step.

    Args:
        good: steps with a verified checkpoint.
        bad: steps with a damaged one.
        keep: how many good ones to keep, at least 1.
        loading: steps in use.
    """
    kept = sorted(set(good), reverse=True)[: max(keep, 1)]
    if not kept:
        return []
    candidates = {*good, *bad} - {*kept} - {*loading}
    bad = {*bad}
    return sorted(
        step for step in candidates if step < kept[-1] and (step not in bad or len(kept) >= keep)
    )
