"""Decide, for what came over the wire: what the journal must learn, and what holds from now on.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from slurm_resilience.controller.actions import (
    DropAgent,
    DropSupervised,
    KeepPendingRequeue,
    Note,
    NoteAgent,
    NoteJob,
    NotePause,
    NoteSupervised,
)
from slurm_resilience.controller.heard import InboxMessage
from slurm_resilience.controller.journal import KnownAgent, PendingRequeue, Supervised
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    PauseRequest,
    RequeueRequest,
)

MAX_TEXT = 500
"""Characters kept of a text that a user wrote."""


def take_in(snapshot: ClusterSnapshot) -> tuple[ClusterSnapshot, tuple[Note, ...]]:
    """Take in what was heard.

    Returns:
        The snapshot with what holds from now on, and the notes that make it last.
    """
    notes: list[Note] = [
        *_review_supervised(snapshot),
        *(note for heard in snapshot.heard.messages for note in notes_of(snapshot, heard)),
        *_review_agents(snapshot),
    ]
    supervised = dict(snapshot.supervised)
    pending_requeues = dict(snapshot.pending_requeues)
    paused = snapshot.paused
    for note in notes:
        match note:
            case NoteSupervised():
                supervised[note.entry.job] = note.entry
            case DropSupervised():
                supervised.pop(note.job, None)
            case KeepPendingRequeue():
                pending_requeues[note.pending_requeue.job] = note.pending_requeue
            case NotePause():
                paused = note.reason
            case _:
                pass
    understood = msgspec.structs.replace(
        snapshot, supervised=supervised, pending_requeues=pending_requeues, paused=paused
    )
    return understood, tuple(notes)


def _review_supervised(snapshot: ClusterSnapshot) -> Iterator[Note]:
    """Drop the jobs that are gone, or run on without a supervisor: they are left to Slurm like
    any other job. One that does not run is kept: it may come back."""
    for entry in snapshot.supervised.values():
        job = snapshot.jobs.get(entry.job)
        if job is None:
            yield DropSupervised(entry.job)
            continue
        is_followed = job.id in snapshot.pending_requeues
        was_requeued = job.restarts > entry.restarts
        if job.state == "RUNNING" and job.id in snapshot.heard.abandoned:
            if not was_requeued and not is_followed:
                # Else it has only just begun again, and its next supervisor is not there yet.
                text = "no supervisor lives: its nodes are left to Slurm"
                yield NoteJob(job.id, "unsupervised", text)
            yield DropSupervised(job.id)
        elif was_requeued and is_followed:
            # This requeue is followed; it needs to be only once.
            yield NoteSupervised(msgspec.structs.replace(entry, restarts=job.restarts))


def notes_of(snapshot: ClusterSnapshot, heard: InboxMessage) -> Iterator[Note]:
    """Yield what the journal must learn from one message."""
    message, job = heard.message, snapshot.jobs.get(heard.job)
    match message:
        case AttemptStarted():
            # What a user says of other people's nodes counts for nothing.
            nodes = tuple(name for name in message.nodes if name in snapshot.nodes)
            yield NoteSupervised(
                Supervised(
                    heard.job,
                    job.uid if job else heard.connection.uid,
                    message.attempt,
                    nodes,
                    snapshot.now,
                    size=sum(name in job.nodes for name in nodes) if job else 0,
                    restarts=job.restarts if job else 0,
                )
            )
            text = f"attempt {message.attempt} on {len(message.nodes)} nodes"
            yield NoteJob(heard.job, "attempt-started", text)
        case AttemptEnded():
            outcome = one_line(message.outcome)
            text = f"attempt {message.attempt} ended ({message.exit_code}): {outcome}"
            yield NoteJob(heard.job, "attempt-ended", text)
        case RequeueRequest() if job is not None:
            reason = one_line(message.reason)
            yield KeepPendingRequeue(
                PendingRequeue(job.id, reason, True, job.restarts, snapshot.now)
            )
            yield NoteJob(job.id, "requeue-asked", reason)
        case PauseRequest():
            yield pause_of(heard, message)


def pause_of(heard: InboxMessage, message: PauseRequest) -> NotePause:
    """Return an administrator's pause, or its end. It counts also while Slurm cannot be read."""
    return NotePause(one_line(message.reason), heard.connection.uid)


def _review_agents(snapshot: ClusterSnapshot) -> Iterator[Note]:
    known_agents = snapshot.heard.known_agents
    for name, agent in snapshot.agents.items():
        known = known_agents.get(name)
        speaking = KnownAgent(name, agent.boot_id, agent.instance)
        if name not in snapshot.nodes:
            yield DropAgent(name, is_removed=True)
        elif agent.was_stopped and known is not None:
            # Stopped on purpose: after a restart of ours its silence is still expected.
            yield DropAgent(name, is_removed=False)
        elif agent.is_heard and known != speaking:
            yield NoteAgent(speaking)


def one_line(text: str) -> str:
    """Make a user's text fit for the journal: one line, of bounded length."""
    return " ".join(text.split())[:MAX_TEXT]
