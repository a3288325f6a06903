"""Rules that must hold at every moment around a supervised srun, whatever happens to it."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.live_step.live_plan import JOIN_SECONDS, TAKEN_SECONDS

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld

SILENCE_SECONDS = 150.0
"""A person who looks at the log of a job in which nothing runs sees a line that is not older."""
HOUR_SECONDS = 3600.0
LONGEST_PAUSE_SECONDS = 120.0
ALIKE_SECONDS = 20.0
"""Long runs that differ by more may have ended at different places."""
CLEARLY_SECONDS = 30.0
"""Between the last step that was known and one that shows progress beyond doubt."""
GIVEN_UP = "no node is at fault, and"
"""In the line with which a program is given up for its failures."""
PER_HOUR = "resume.max_per_hour"
"""In the line with which it is given up for all attempts of an hour."""
ABSENCE_SLACK_SECONDS = 15.0
"""The supervisor looks from time to time: an absence may be counted with the moments around it."""
_LATE_JOIN = re.compile(r"the join step of seats \S+ on (\S+) failed: its processes ")
_HOPELESS = re.compile(r"no seat has stepped for (\d+) s: ")
_LATE_GROWTH = re.compile(r"not grown: its ranks did not step within (\d+) s")


class ResumeRule(enum.StrEnum):
    """The rules."""

    TWO_WRITERS = "no two attempts run that both may write"
    FALSE_SUCCESS = "no success is reported that the program did not give"
    FALSE_FAILURE = "a program that ended well is not reported as failed"
    SILENCE = "the log is not silent while nothing runs"
    BUDGETS = "the limits on attempts hold"
    ONE_RECOVERY = "exactly one recovery is under way"
    PERSON = "nothing is started again after a person has ended it"
    TAKEN_OUT = "no node is got in place of one that a person took out of the job"
    STRANGER = "no end is taken for a person's, who did nothing"
    SPARES = "a spare is used once, and before the job is given up"
    CLAIM = "no two sruns of a job take one node"
    LAUNCH = "a node whose slurmd is away is left where there is a spare"
    SEAT = "a lost seat is filled once"
    HELPERS = "each helper allocation is merged or given back"
    COMPANION = "a companion allocation ends with the run of the job that asked for it"
    PROGRESS = "a program that gets further is not given up for its failures"
    UNANSWERED = "a program is not given up for an srun that slurmctld did not answer"
    NAMED = "a node is named only when the program goes on without it"
    HANG = "a step that makes progress is not ended for a hang, and one that hangs is ended"
    ABSENCE = "a limit does not count the time in which the supervisor itself was away"
    ASKED_TWICE = "no nodes are asked for twice"
    SNOOZE = "an elastic step asks for nodes again after a pause"
    MOST = "an elastic step has no more nodes than it may"
    UNUSED = "nodes that an elastic step is given are used, or given back"
    CORE = "an elastic step keeps the job's own nodes"
    GROWS = "an elastic step grows into nodes that are free for long"
    PREEMPTED = "a job that Slurm preempts runs again, where its PreemptMode says so"
    TAKEN = "no attempt begins on nodes that Slurm is about to take"
    ENDS = "the supervisor comes to an end"


class BrokenResumeRule(Exception):
    """Something happened that must never happen."""

    def __init__(self, rule: ResumeRule, at: float, text: str) -> None:
        super().__init__(f"{at:.1f} s: {rule}: {text}")
        self.rule = rule


class StartedAttempt(NamedTuple):
    """An attempt as the simulation saw it."""

    at: float
    token: str
    step_before: int
    """The last step that the program had reported when it began; -1: none."""
    nodes: tuple[str, ...]
    got_further: bool = False
    """The attempt before has told a step that none before it had told."""
    taken: bool = False
    """Slurm has ended the job under it, or a person has taken a node of it, and no supervisor had
    asked for that."""


class FurthestTold:
    """The steps that attempts have told, beside those of all attempts before."""

    def __init__(self) -> None:
        self._best = self._before = -1
        self._known_until = 0.0
        self.got_further = self.got_clearly_further = False

    def begin(self, now: float) -> None:
        """Begin another attempt."""
        self._before, self._known_until = self._best, now
        self.got_further = self.got_clearly_further = False

    def told(self, step: int, now: float) -> None:
        """Count a step that the supervisor has heard."""
        self._best = max(self._best, step)
        if step <= self._before:
            self._known_until = now
        else:
            self.got_further = True
            self.got_clearly_further |= now - self._known_until > CLEARLY_SECONDS

    def forget(self) -> None:
        """Forget all: the job is started again, and a supervisor that was killed kept nothing."""
        self._best = -1


class AttemptBudget:
    """Counts the attempts by itself, from what was started and what was reported."""

    def __init__(self, limits: ResumeSettings) -> None:
        self.limits = limits
        self.attempts: list[StartedAttempt] = []
        self.furthest = FurthestTold()
        self._last_run = 0.0
        """Seconds of the last run that ended by the program's bug."""
        self._bug_ends: list[float] = []
        """When the program's own bug ended runs, in a row: nothing else has happened since."""

    def failed_by_bug(self, at: float) -> None:
        """Count the end of a run by the program's bug."""
        ran_for = at - self.attempts[-1].at if self.attempts else 0.0
        is_long = self._last_run >= self.limits.progress_after
        if is_long and abs(ran_for - self._last_run) > ALIKE_SECONDS:
            self._bug_ends.clear()  # a long run counts as progress, unless the next is as long
        self._last_run = ran_for
        self._bug_ends.append(at)

    def disturb(self) -> None:
        """Forget the row: something else has happened."""
        self._bug_ends.clear()

    def take(self) -> None:
        """Note that Slurm ends the job, for which no supervisor has asked: the attempt is not one
        without progress."""
        self.attempts[-1:] = [attempt._replace(taken=True) for attempt in self.attempts[-1:]]

    def clear(self) -> None:
        """Forget all attempts: the supervisor of the job's next run knows of none."""
        self.attempts.clear()
        self.furthest.forget()

    def _loops(self, attempt: StartedAttempt) -> str:
        """Return what is wrong with one more attempt at a program with a bug; empty: nothing."""
        row = len(self._bug_ends)
        if row > self.limits.max_relaunches:
            return f"{row} runs in a row ended at the same bug, and one more is started"
        pause = min(LONGEST_PAUSE_SECONDS, self.limits.backoff * 2 ** (row - 2)) if row > 1 else 0
        if row and attempt.at - self._bug_ends[-1] < pause:
            return f"{row} runs in a row ended at the same bug, and the next does not wait"
        return ""

    def start(self, attempt: StartedAttempt) -> str:
        """Count an attempt; return what is wrong with it, empty: nothing.

        A run that is counted as one without progress has begun an hour ago at most, as the next
        one begins, and has been followed by one that knew no later step.
        """
        last = self.attempts[-1] if self.attempts else None
        self.furthest.begin(attempt.at)
        # A node that was the only one to fail is left, and the next attempt is at once.
        moved = last is None or set(last.nodes) != set(attempt.nodes)
        # The end of the first task may have been lost on its way, while others waited for it.
        is_long = last is not None and attempt.at - last.at >= self.limits.progress_after
        waited = is_long and self._last_run < self.limits.progress_after
        if last is None or moved or waited or _made_progress(last, attempt):
            self.disturb()
        self.attempts.append(attempt)
        loops = self._loops(attempt)
        if loops:
            return loops
        if len(self.attempts) > self.limits.max_attempts:
            return f"attempt {len(self.attempts)} of {self.limits.max_attempts} is started"
        in_vain = self._in_vain(attempt.at)
        progressed = last is not None and _made_progress(last, attempt)
        if in_vain >= self.limits.max_per_hour and not progressed:
            return f"{in_vain} attempts within an hour made no progress, and one more is started"
        return ""

    def check_given_up(self) -> str:
        """Return what is wrong with the word that too many attempts of the last hour made no
        progress; empty: nothing."""
        own = sum(not attempt.taken for attempt in self.attempts)
        if own >= self.limits.max_per_hour:
            return ""
        return f"it is given up for {own} attempts, beside those that Slurm has ended"

    def _in_vain(self, now: float) -> int:
        """Count the attempts of the last hour, but the last one, that made no progress."""
        return sum(
            now - earlier.at < HOUR_SECONDS
            and not earlier.taken
            and not _made_progress(earlier, following)
            for earlier, following in zip(self.attempts, self.attempts[1:], strict=False)
        )


def _made_progress(earlier: StartedAttempt, following: StartedAttempt) -> bool:
    """Return whether the first of two attempts in a row got further than those before it."""
    return following.step_before > earlier.step_before or following.got_further


class JoinBudget:
    """Counts the join steps of one attempt by itself."""

    def __init__(self, limits: ResumeSettings) -> None:
        self._limits = limits
        self._rows: dict[int, tuple[int, float]] = {}
        """For each seat: its deaths in a row on one node, and when its last join step began."""
        self._unlaunched: dict[int, int] = {}
        """Join steps in a row of a seat whose node took no task: no death of its program."""

    def began(self, seats: Collection[int], attempt: float) -> float:
        """Return when the last join step of these seats began; else when the attempt did."""
        return max((self._rows[seat][1] for seat in seats if seat in self._rows), default=attempt)

    def not_launched(self, seats: Collection[int]) -> None:
        """Note that the last join step of these seats has started no task."""
        for seat in seats:
            self._unlaunched[seat] = self._unlaunched.get(seat, 0) + 1

    def start(self, seats: Collection[int], node: str, moved: bool, now: float) -> str:
        """Count a join step; return what is wrong with it, empty: nothing.

        One in a row begins on the same node, before the one before could have lived for long. Those
        of which no task was started are no row, and come after a pause.

        Args:
            seats: that it fills.
            node: its own.
            moved: the seats were on another machine; no task died that this one stands for.
            now: seconds.
        """
        most = 0
        for seat in seats:
            deaths, began = self._rows.get(seat, (0, now))
            failed = self._unlaunched.pop(seat, 0) if moved else self._unlaunched.get(seat, 0)
            deaths = 0 if now - began > self._limits.progress_after else deaths
            deaths = 0 if moved else deaths + (not failed)
            self._rows[seat] = deaths, now
            most = max(most, deaths)
            if failed > self._limits.max_per_node and now - began < self._limits.backoff:
                return f"{node} took no task {failed} times, and is tried without a pause"
        if most <= self._limits.max_relaunches:
            return ""
        return f"{most} join steps in a row on {node}, after short lives"


class Absences:
    """All absences of the supervisors of one run."""

    def __init__(self) -> None:
        self._absences: list[tuple[float, float]] = []

    def note(self, began: float, ended: float) -> None:
        """Note one. Both are seconds since the start of the run."""
        self._absences.append((began, ended))

    def awake(self, since: float, until: float) -> float:
        """Return the seconds between two times in which the supervisor was there."""
        away = sum(
            max(0.0, min(ended, until) - max(began, since)) for began, ended in self._absences
        )
        return until - since - away

    def check_line(self, world: ResumeWorld, text: str) -> None:
        """Check that a limit of which the log tells is over by the time in which the supervisor was
        there: what it waited for may not have come, or not have been seen, while it was not."""
        now = world.schedule.now
        if found := _LATE_JOIN.search(text):
            sruns = [s for s in world.sruns if s.is_join and s.wanted == (found[1],)]
            began = max((s.began_at for s in sruns), default=0.0)
            self._check(world, began, now, JOIN_SECONDS, text)
        elif found := _HOPELESS.search(text):
            longest = world.seen.budget.limits.swap_wait
            if world.books.most_nodes is not None:
                longest = min(longest, TAKEN_SECONDS)
            training = world.progress.training
            if training is not None and training.is_waiting:
                self._check(world, training.mesh.since, now, longest, text)
        elif found := _LATE_GROWTH.search(text):
            # They are ended in this moment; so are those of another companion, where Slurm has just
            # preempted it.
            ended = [s for s in world.sruns if not s.running and s.gone_at >= now - 1.0]
            began = min((s.began_at for s in ended if s.is_companion), default=0.0)
            self._check(world, began, now, float(found[1]), text)

    def _check(
        self, world: ResumeWorld, since: float, now: float, longest: float, text: str
    ) -> None:
        awake = self.awake(since, now)
        if awake < longest - ABSENCE_SLACK_SECONDS:
            there = f"the supervisor was there for {awake:.0f} s of {now - since:.0f} s"
            world.broken(ResumeRule.ABSENCE, f"{text}; {there}")
