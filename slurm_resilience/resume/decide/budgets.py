"""Tell when another attempt would only waste the allocation, or should wait. Pure.

A crash loop is the same failure at the same place without progress, however long a run takes.
Progress is a checkpoint that the program reports, or steps beyond those of the attempts before
(`progress/furthest_step.py`). A program that tells neither may still make some, so a failure after
a long run is the same one only where the run was as long as the one before, or where the log names
the same line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.decide.classify import Ending, category_of, describe, killed
from slurm_resilience.resume.decide.signatures import Category, Explanation

SHORT_LIFE_SECONDS = 10.0
"""A program that fails faster than this with an exit code of its own, on its first attempt, has a
fault of its own (a typo, a missing file); another attempt would show the same."""
ALIKE_SECONDS = 30.0
"""Two long runs whose lengths differ by less than this, or by `ALIKE_SHARE`, ended at the same
place."""
ALIKE_SHARE = 0.05
HOUR_SECONDS = 3600.0
ENDS_FOR_NAME = 2
"""Attempts that ended on a node, and not on others, before it is named to sresctld."""
LONGEST_PAUSE_SECONDS = 120.0
"""Before a further attempt; a person who looks at the log meanwhile sees why nothing runs."""
_VARIES = (
    r"0x[0-9a-fA-F]+|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|\[?(?:rank|Rank|default)\s?\d+\]?:?"
)
"""The parts of a line that differ where the failure is the same: addresses, times, ranks."""


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
        if not (ending.made_progress or ending.taken_by_slurm)
        # Before a requeue another machine may have told the time.
        and abs(last.ended_at - ending.ended_at) < HOUR_SECONDS
    ]
    if last.ended_at and not last.made_progress and len(recent) >= limits.max_per_hour:
        return f"{len(recent)} attempts within an hour made no progress (resume.max_per_hour)"
    return ""


def fault_of_program(history: tuple[Ending, ...], limits: ResumeSettings) -> str:
    """Return why the last end is the program's own fault; empty: the error may pass.

    Args:
        history: every ending so far. The last one had no fault of a node.
        limits: `[resume]` of the configuration.
    """
    if history[-1].was_busy and all(ending.was_busy for ending in history):
        return "srun was not to wait for other steps of the job (--immediate)"
    if history[-1].never_began:
        return ""  # `spent` limits these, and a pause comes before each further one
    if history[-1].taken_by_slurm:
        return ""  # the next attempt has fewer nodes, or others
    history = tuple(ending for ending in history if not ending.never_began)
    last = history[-1]
    what = "a hang" if last.hang else describe(last.own_code)
    by_itself = not killed(last.own_code) and not _may_pass(last)
    # Its own fault: it failed at once, by itself, and never got anywhere.
    never_ran = len(history) == 1 and not last.made_progress and last.lasted < SHORT_LIFE_SECONDS
    if by_itself and never_ran:
        return f"{what} after {last.lasted:.1f} s without progress: it is a bug"
    row = list(_in_a_row(history, limits))
    alike = [ending for ending in row if ending.own_code == last.own_code]
    if by_itself and len(alike) >= 2:
        return f"the program ended with {what} {len(alike)} times without progress: it is a bug"
    if len(row) > limits.max_relaunches:
        return f"{len(row)} attempts in a row made no progress (resume.max_relaunches)"
    stuck = list(_without_progress(history))
    same = [ending for ending in stuck if _same_failure(ending, last)]
    if len(same) > limits.max_relaunches:
        return (
            f"the program ended with {what} {len(same)} times {_place(same, last)}, "
            "without progress: it is a bug (resume.max_relaunches)"
        )
    alike = [ending for ending in stuck if ending.own_code == last.own_code]
    if len(alike) > limits.max_same_failure:
        return (
            f"the program ended with {what} {len(alike)} times without progress "
            "(resume.max_same_failure)"
        )
    return ""


def pause_before_next(history: tuple[Ending, ...], limits: ResumeSettings) -> float:
    """Return the seconds to wait before a program is started again that failed by itself.

    The first relaunch is at once, and so is one after a node's fault: its node has been left. Each
    further one in a row without progress waits twice as long. A slurmctld that did not answer srun
    has a moment first: in the second of its start it refuses steps that it makes soon after.

    Args:
        history: every ending so far, the last one included.
        limits: `[resume]` of the configuration.
    """
    row = 0
    for ending in reversed(history):
        if ending.taken_by_slurm:
            continue
        if ending.made_progress or ending.faulty:
            break
        row += 1
    row += row > 0 and history[-1].never_began
    doubled = min(row - 2, 16)  # far beyond the longest pause
    return min(LONGEST_PAUSE_SECONDS, limits.backoff * 2.0**doubled) if row >= 2 else 0.0


def nodes_that_eat_attempts(history: tuple[Ending, ...], limits: ResumeSettings) -> tuple[str, ...]:
    """Return the nodes on which attempts end again and again, so that they are used no more.

    An attempt counts for a node that was at fault in it, or the only one to fail, if it ran for
    less than an hour and made no progress. A name counts, whatever machine has it.

    Args:
        history: every ending so far.
        limits: `[resume]` of the configuration.
    """
    eaten: Counter[str] = Counter()
    for ending in history:
        if ending.taken_by_slurm:
            continue
        if not ending.made_progress and ending.ran_for < HOUR_SECONDS:
            eaten.update({*ending.faulty} or {ending.first_failed})
    return tuple(sorted(node for node, n in eaten.items() if node and n >= limits.max_per_node))


def ends_without_cause(history: tuple[Ending, ...]) -> dict[str, list[Ending]]:
    """Return, for each node, the attempts that ended there alone without progress, and without a
    fault that is known already.

    Args:
        history: every ending so far.
    """
    ended: dict[str, list[Ending]] = {}
    for ending in history:
        alone = ending.first_failed and not (ending.faulty or ending.taken_by_slurm)
        if alone and not ending.made_progress and ending.ran_for < HOUR_SECONDS:
            ended.setdefault(ending.first_failed, []).append(ending)
    return ended


def nodes_to_name(
    history: tuple[Ending, ...], nodes: tuple[str, ...], ran_for: float, got_further: bool
) -> dict[str, int]:
    """Return the nodes to be named to sresctld, each with the number of attempts that ended there.

    A program with a bug fails first on one node too. So a node is named only when the program goes
    on without it.

    Args:
        history: every ending so far.
        nodes: of the running attempt.
        ran_for: seconds that it has run for.
        got_further: it has got further than the attempts before.
    """
    return {
        node: len(ends)
        for node, ends in ends_without_cause(history).items()
        if node not in nodes and len(ends) >= ENDS_FOR_NAME
        if got_further or ran_for > max(end.ran_for for end in ends) + ALIKE_SECONDS
    }


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


def _may_pass(ending: Ending) -> bool:
    """Return whether the log names a cause that is often gone at the next try."""
    return category_of(ending.first_failure, ending.log) is Category.TRANSIENT


def _same_failure(one: Ending, other: Ending) -> bool:
    same_place = (
        alike(one.lasted, other.lasted) or _same_line(one.log, other.log) or _same_step(one, other)
    )
    return one.own_code == other.own_code and same_place


def _same_step(one: Ending, other: Ending) -> bool:
    """Return whether both told the same last step, or one that is one away: the last is not always
    told."""
    first, second = one.observed.furthest, other.observed.furthest
    return min(first, second) >= 0 and abs(first - second) <= 1


def alike(one: float, other: float) -> bool:
    """Return whether two lives of so many seconds may have ended at the same place."""
    return one == other or abs(one - other) <= max(ALIKE_SECONDS, ALIKE_SHARE * max(one, other))


def _same_line(one: Explanation | None, other: Explanation | None) -> bool:
    """Return whether two logs name the same fault of the program, word for word.

    A line with a step's number in it tells of another place each time.
    """
    roots = [log.root for log in (one, other) if log is not None and log.root is not None]
    if len(roots) < 2 or roots[0].category not in (Category.BUG, Category.OUT_OF_MEMORY):
        return False
    first, second = (re.sub(_VARIES, "", root.text) for root in roots)
    return roots[0].signature == roots[1].signature and first == second


def _place(same: list[Ending], last: Ending) -> str:
    """Return in words where a program failed each time."""
    if all(_same_step(ending, last) for ending in same):
        return f"at step {last.observed.furthest}"
    if all(alike(ending.lasted, last.lasted) for ending in same):
        return f"after about {last.lasted:.0f} s"
    return "with the same line in its log"


def _without_progress(history: tuple[Ending, ...]) -> Iterator[Ending]:
    """Yield the last endings that no node explains, newest first, since there was progress."""
    for ending in reversed(history):
        if ending.made_progress:
            return
        if not (ending.faulty or ending.never_began or ending.taken_by_slurm):
            yield ending


def _in_a_row(history: tuple[Ending, ...], limits: ResumeSettings) -> Iterator[Ending]:
    """Yield the last endings, newest first, since a node's fault, progress or a long run."""
    for ending in reversed(history):
        if ending.faulty or ending.made_progress or ending.lasted >= limits.progress_after:
            return
        if not (ending.never_began or ending.taken_by_slurm):
            yield ending
