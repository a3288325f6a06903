"""Write down what was heard, before anything is done about it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection

from slurm_resilience.clock import Clock
from slurm_resilience.controller.actions import (
    DropAgent,
    DropAnswers,
    DropSupervised,
    KeepPendingRequeue,
    Note,
    NoteAgent,
    NoteAnswered,
    NoteBreaker,
    NoteFault,
    NoteJob,
    NoteKept,
    NoteMissing,
    NoteObserved,
    NotePause,
    NotePutBack,
    NoteStale,
    NoteSupervised,
)
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import PUT_BACK
from slurm_resilience.controller.registry import Registry
from slurm_resilience.controller.spares.pool_records import MoveGift, MovePool
from slurm_resilience.errors import IllegalTransition

log = logging.getLogger("sresctld")

MAX_LINES, LINES_SECONDS = 20, 60.0
"""Lines of one job that are journaled in so many seconds; a user must not fill the disk."""


class NoteWriter:
    """Writes notes into the journal."""

    def __init__(self, journal: Journal, registry: Registry, clock: Clock) -> None:
        self._journal = journal
        self._registry = registry
        self._clock = clock
        self._lines_of: dict[int, deque[float]] = {}

    def write(self, note: Note) -> None:
        match note:
            case NoteSupervised():
                self._journal.put_supervised(note.entry)
            case DropSupervised():
                self._journal.drop_supervised(note.job)
            case NoteJob():
                self._line_of_job(note)
            case KeepPendingRequeue():
                self._journal.put_pending_requeue(note.pending_requeue)
            case NotePause():
                self._journal.pause(note.reason)
                text = f"paused: {note.reason}" if note.reason else "goes on"
                self._journal.event(self._clock.now(), "pause", f"{text} (uid {note.uid})")
            case NoteAgent():
                self._journal.put_agent(note.agent)
                self._journal.forget_boots(note.agent.node, note.agent.boot_id)
            case NoteMissing() | NoteKept() | NoteStale():
                self._node(note)
            case NoteAnswered() | NotePutBack() | DropAnswers():
                self._answer(note)
            case NoteFault():
                self._fault(note)
            case NoteBreaker():
                self._breaker(note)
            case NoteObserved() | MovePool() | MoveGift():
                self._spare_or_observed(note)
            case DropAgent():
                if note.is_removed:
                    self._registry.forget(note.node)
                self._journal.drop_agent(note.node)

    def _spare_or_observed(self, note: NoteObserved | MovePool | MoveGift) -> None:
        """Write the news of a fault that is only observed, or what has become of spares;
        a word of a person that is said twice counts once."""
        if isinstance(note, NoteObserved):
            self._journal.put_observed(note.fault, note.news)
            for remark in note.news:
                log.info("%s: %s: %s", note.fault.node, remark.kind, remark.text)
            return
        try:
            if isinstance(note, MovePool):
                self._journal.move_pool(note, self._clock.now())
            else:
                self._journal.move_gift(note, self._clock.now())
        except IllegalTransition as error:
            log.info("spares: %s", error)

    def _node(self, note: NoteMissing | NoteKept | NoteStale) -> None:
        """Write how Slurm lists a node: not at all, kept out by a person, with an old reason."""
        match note:
            case NoteMissing():
                self._journal.put_missing(note.node, note.since)
            case NoteKept():
                self._journal.keep(note.node, note.is_kept)
                if not note.is_kept:
                    text = "no person keeps the node any more"
                    self._journal.event(self._clock.now(), PUT_BACK, text, node=note.node)
            case NoteStale():
                self._journal.put_stale_reason(note.node, note.reason)

    def _answer(self, note: NoteAnswered | NotePutBack | DropAnswers) -> None:
        """Write that a person put a node back, and what that answers."""
        match note:
            case NoteAnswered():
                self._journal.acknowledge(note.node, note.findings)
            case NotePutBack():
                self._journal.note_put_back(note.incident, note.at)
            case DropAnswers():
                self._journal.drop_answers(note.node, note.findings)

    def _fault(self, note: NoteFault) -> None:
        if note.is_forgotten:
            self._journal.drop_fault(note.fault.node)
        else:
            self._journal.put_fault(note.fault)

    def _breaker(self, note: NoteBreaker) -> None:
        """Write the breaker's state, and its turns as events."""
        before, now = self._journal.breaker(), self._clock.now()
        self._journal.put_breaker(note.state)
        if note.by_uid is not None:
            self._journal.event(now, "breaker", f"reset (uid {note.by_uid})")
        elif note.state.is_tripped and not before.is_tripped:
            self._journal.event(now, "breaker", f"tripped: {note.state.text}")
        elif before.is_tripped and not note.state.is_tripped:
            self._journal.event(now, "breaker", "closed: the storm is over")

    def keep_only(self, jobs: Collection[int]) -> None:
        """Forget how much the jobs that are gone have said."""
        for job in [job for job in self._lines_of if job not in jobs]:
            del self._lines_of[job]
        for gift in self._journal.spares().gifts.values():
            if gift.job not in jobs and not gift.state.is_open:
                self._journal.drop_gift(gift.job)

    def _line_of_job(self, note: NoteJob) -> None:
        """Write what a job's supervisor says. Any user with a job can say it, however often."""
        now = self._clock.now()
        times = self._lines_of.setdefault(note.job, deque(maxlen=MAX_LINES))
        if len(times) == MAX_LINES and now - times[0] < LINES_SECONDS:
            return
        times.append(now)
        data = {"uid": note.uid} if note.uid >= 0 else {}
        self._journal.event(now, note.kind, note.text, node=note.node, job=note.job, **data)
