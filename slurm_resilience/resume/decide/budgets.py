"""Tell when another attempt would only waste the allocation. Pure.

A crash loop is the same failure at the same place without progress, however long a run takes. A
program that reports no progress may still make some, so a failure after a long run is the same one
only where the run was as long as the one before.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.decide.classify import Ending, describe, killed

SHORT_LIFE_SECONDS = 10.0
"""A program that fails faster than this with an exit code of its own, on its first attempt, has a
fault of its own (a typo, a missing file); another attempt would show the same."""
ALIKE_SECONDS = 30.0
"""Two long runs whose lengths differ by less than this, or by `ALIKE_SHARE`, ended at the same
place."""
ALIKE_SHARE = 0.05
HOUR_SECONDS = 3600.0


def spent(history: tuple[Ending, ...], limits: ResumeSettings) -> str:
    """Return the budget that is used up, whatever the cause of the end; empty: none is.

    Args:
        history: every ending so far, the last one included.
        limits: `[resume]` of the configuration.
    """
    if len(history) >= limits.max_attempts:
        return f"{len(history)} attempts were made (resume.max_attempts)"
    if not history:
        return ""
    last = history[-1]
    recent = [
        ending
        for ending in history
        if not ending.progressed and last.ended_at - ending.ended_at < HOUR_SECONDS
    ]
    if last.ended_at and not last.progressed and len(recent) >= limits.max_per_hour:
        return f"{len(recent)} attempts within an hour made no progress (resume.max_per_hour)"
    return ""


def fault_of_program(history: tuple[Ending, ...], limits: ResumeSettings) -> str:
    """Return why the last end is the program's own fault; empty: the error may pass.

    Args:
        history: every ending so far. The last one had no fault of a node.
        limits: `[resume]` of the configuration.
    """
    last = history[-1]
    what = describe(last.own_code)
    # Its own fault: it failed at once, by itself, and never got anywhere.
    if (
        len(history) == 1
        and not last.progressed
        and not killed(last.own_code)
        and last.ran_for < SHORT_LIFE_SECONDS
    ):
        return f"{what} after {last.ran_for:.1f} s without progress is the program's own"
    row = list(_in_a_row(history, limits))
    alike = [ending for ending in row if ending.own_code == last.own_code]
    if not killed(last.own_code) and len(alike) >= 2:
        return f"the program ended with {what} {len(alike)} times without progress"
    if len(row) > limits.max_relaunches:
        return f"{len(row)} attempts in a row made no progress (resume.max_relaunches)"
    stuck = list(_without_progress(history))
    same = [ending for ending in stuck if _same_failure(ending, last)]
    if len(same) > limits.max_relaunches:
        return (
            f"the program ended with {what} {len(same)} times after about {last.ran_for:.0f} s, "
            "without reporting progress: it is a bug (resume.max_relaunches)"
        )
    alike = [ending for ending in stuck if ending.own_code == last.own_code]
    if len(alike) > limits.max_same_failure:
        return (
            f"the program ended with {what} {len(alike)} times and never reported progress "
            "(resume.max_same_failure)"
        )
    return ""


def node_that_fails(history: tuple[Ending, ...]) -> str:
    """Return the only node that failed in all attempts without progress; empty: there is none.

    Called where the program would be given up: a fault that no check sees may be that node's. When
    the program fails in the same way on another node, it is the program's.
    """
    stuck = list(_without_progress(history))
    same = [ending for ending in stuck if _same_failure(ending, history[-1])]
    nodes = {ending.first_failed for ending in stuck}
    if len(same) < 2 or len(nodes) != 1 or len(history[-1].nodes) < 2:
        return ""
    return nodes.pop()


def _same_failure(one: Ending, other: Ending) -> bool:
    apart = abs(one.ran_for - other.ran_for)
    longest = max(one.ran_for, other.ran_for)
    return one.own_code == other.own_code and apart <= max(ALIKE_SECONDS, ALIKE_SHARE * longest)


def _without_progress(history: tuple[Ending, ...]) -> Iterator[Ending]:
    """Yield the last endings that no node explains, newest first, since a step was reported."""
    for ending in reversed(history):
        if ending.progressed:
            return
        if not ending.faulty:
            yield ending


def _in_a_row(history: tuple[Ending, ...], limits: ResumeSettings) -> Iterator[Ending]:
    """Yield the last endings, newest first, since a node's fault, progress or a long run."""
    for ending in reversed(history):
        if ending.faulty or ending.progressed or ending.ran_for >= limits.progress_after:
            return
        yield ending
