"""Decide, for what came over the wire: what the journal must learn, and what holds from now on.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from slurm_resilience.controller.actions import (
    DropAgent,
    DropAnswers,
    DropSupervised,
    KeepPendingRequeue,
    Note,
    NoteAgent,
    NoteBreaker,
    NoteJob,
    NoteMissing,
    NotePause,
    NoteSupervised,
)
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide import breaker
from slurm_resilience.controller.heard import InboxMessage
from slurm_resilience.controller.journal.records import (
    EATS_ATTEMPTS,
    LEFT_OUT,
    WRONG_RESULTS,
    KnownAgent,
    PendingRequeue,
    Supervised,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.spares.pool_plan import resumed
from slurm_resilience.model import Job
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    BreakerReset,
    LeftNode,
    PauseRequest,
    RequeueRequest,
    ResizeRequest,
    SparesResume,
    WrongResults,
)

REMOVED_AFTER_SECONDS = 60.0
"""Out of Slurm's listings for this long, a node counts as removed."""
MOST_NAMED_NODES = 3
"""Nodes that one job may name, for one kind of trouble."""
NAMED_AGAIN_SECONDS = 3600.0
"""Between two such words of one job about one node."""
MAX_TEXT = 500
"""Characters kept of a text that a user wrote."""
LEAST_UNSEEN = 16
"""Announced nodes that may be kept for a job until Slurm shows them as the job's; a job that holds
more may announce as many again."""


def take_in(snapshot: ClusterSnapshot) -> tuple[ClusterSnapshot, tuple[Note, ...]]:
    """Take in what was heard.

    Returns:
        The snapshot with what holds from now on, and the notes that make it last.
    """
    notes: list[Note] = [
        *_review_missing(snapshot),
        *_review_supervised(snapshot),
        *_heard(snapshot),
        *_review_agents(snapshot),
        *_review_answers(snapshot),
    ]
    supervised = dict(snapshot.supervised)
    pending_requeues = dict(snapshot.pending_requeues)
    paused, memory = snapshot.paused, snapshot.memory
    missing = dict(memory.missing)
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
            case NoteBreaker():
                memory = msgspec.structs.replace(memory, breaker=note.state)
            case NoteMissing(node, since) if since:
                missing[node] = since
            case NoteMissing():
                missing.pop(note.node, None)
            case _:
                pass
    understood = msgspec.structs.replace(
        snapshot,
        supervised=supervised,
        pending_requeues=pending_requeues,
        paused=paused,
        memory=msgspec.structs.replace(memory, missing=missing),
    )
    return understood, tuple(notes)


def _heard(snapshot: ClusterSnapshot) -> Iterator[Note]:
    """Yield what the journal must learn from all messages, each on top of those before it: several
    supervisors of one job may announce themselves in one cycle, and none hides another's nodes."""
    for heard in snapshot.heard.messages:
        for note in tuple(notes_of(snapshot, heard)):
            if isinstance(note, NoteSupervised):
                supervised = {**snapshot.supervised, note.entry.job: note.entry}
                snapshot = msgspec.structs.replace(snapshot, supervised=supervised)
            yield note


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
        seen = _compared_with_slurm(snapshot, entry, job)
        # A stranded one stays ours until it is ended: no supervisor comes back to it.
        is_left = job.id in snapshot.heard.abandoned and not job.is_stranded
        if job.state == "RUNNING" and is_left:
            if not was_requeued and not is_followed:
                # Else it has only just begun again, and its next supervisor is not there yet.
                text = "no supervisor lives: its nodes are left to Slurm"
                yield NoteJob(job.id, "unsupervised", text, uid=job.uid)
            yield DropSupervised(job.id)
        elif was_requeued and is_followed:
            # This requeue is followed; it needs to be only once.
            yield NoteSupervised(msgspec.structs.replace(seen, restarts=job.restarts, lost=()))
        elif seen != entry:
            yield NoteSupervised(seen)


def _compared_with_slurm(snapshot: ClusterSnapshot, entry: Supervised, job: Job) -> Supervised:
    """Return what is known of a supervised job, with what Slurm shows of its nodes now."""
    held = set(job.all_nodes)
    seen = tuple(name for name in entry.unseen if name in held)
    nodes = (*entry.nodes, *seen)
    lost = tuple(
        name
        for name in nodes
        if name not in held and (name in entry.lost or _is_faulty(snapshot, name))
    )
    return msgspec.structs.replace(
        entry,
        nodes=nodes,
        unseen=tuple(name for name in entry.unseen if name not in held),
        lost=lost,
        size=max(entry.size, min(entry.size + len(seen), len(held))),
    )


def _is_faulty(snapshot: ClusterSnapshot, name: str) -> bool:
    """Tell whether a node is in a trouble that no user can bring about."""
    node = snapshot.nodes.get(name)
    return node is None or not node.is_available or name in snapshot.incidents


def _announced(
    snapshot: ClusterSnapshot, heard: InboxMessage, message: AttemptStarted
) -> Supervised:
    """Return a supervised job as its supervisor announces it: any user's program can.

    Nodes that Slurm does not show as the job's count for nothing. They are kept aside, because
    Slurm's picture may be older than a node that was taken in just now.
    """
    job, known = snapshot.jobs.get(heard.job), snapshot.supervised.get(heard.job)
    held = set(job.all_nodes) if job else set()
    # One of the job's own may be missing from this listing by chance: the step needs it too.
    announced = dict.fromkeys(n for n in message.nodes if n in snapshot.nodes or n in held)
    lost: tuple[str, ...] = ()
    most = len(held)
    if known is not None and job is not None and known.restarts == job.restarts:
        known = _compared_with_slurm(snapshot, known, job)
        # A job may have several supervisors, each with a step of its own. Each of them passes over
        # what it is told of the others' nodes.
        announced |= dict.fromkeys(name for name in known.nodes if name in held)
        lost = tuple(name for name in known.lost if name in announced)
        most = max(most, known.size)
    nodes = tuple(name for name in announced if name in held or name in lost)
    others = [name for name in announced if name not in nodes]
    if job is not None:
        others = others[: max(most, LEAST_UNSEEN)]
    return Supervised(
        heard.job,
        job.uid if job else heard.connection.uid,
        message.attempt,
        nodes,
        snapshot.now,
        size=min(len(nodes), most),
        restarts=job.restarts if job else 0,
        unseen=tuple(others),
        lost=lost,
    )


def notes_of(snapshot: ClusterSnapshot, heard: InboxMessage) -> Iterator[Note]:
    """Yield what the journal must learn from one message."""
    message, job = heard.message, snapshot.jobs.get(heard.job)
    match message:
        case AttemptStarted():
            entry = _announced(snapshot, heard, message)
            yield NoteSupervised(entry)
            count = len({*message.nodes} & {*entry.nodes, *entry.unseen})
            text = f"attempt {message.attempt} on {count} nodes"
            yield NoteJob(heard.job, "attempt-started", text, uid=entry.uid)
        case AttemptEnded():
            outcome = one_line(message.outcome)
            text = f"attempt {message.attempt} ended ({message.exit_code}): {outcome}"
            uid = job.uid if job else heard.connection.uid
            yield NoteJob(heard.job, "attempt-ended", text, uid=uid)
        case RequeueRequest() if job is not None and not job.may_be_requeued:
            text = "a job with Requeue=0 cannot be requeued"
            yield NoteJob(job.id, "requeue-refused", text, uid=job.uid)
        case RequeueRequest() if job is not None:
            reason = one_line(message.reason)
            yield KeepPendingRequeue(
                PendingRequeue(job.id, reason, True, job.restarts, snapshot.now)
            )
            yield NoteJob(job.id, "requeue-asked", reason, uid=job.uid)
        case ResizeRequest(_, nodes) if job is not None:
            uid = heard.connection.uid
            who = "root" if uid == 0 else f"uid {uid}"
            yield NoteJob(job.id, "resized", f"to {nodes} nodes by {who}", uid=job.uid)
        case WrongResults() | LeftNode() if job is not None:
            yield from _named(snapshot, job, message)
        case PauseRequest():
            yield pause_of(heard, message)
        case BreakerReset():
            state = breaker.reset(snapshot.memory.breaker, snapshot.now)
            yield NoteBreaker(state, heard.connection.uid)
        case SparesResume():
            yield from resumed(snapshot)


def _named(
    snapshot: ClusterSnapshot, job: Job, message: WrongResults | LeftNode
) -> Iterator[NoteJob]:
    """Yield a note of a job's word about a node. Any user's program can say it: of its own nodes
    alone, of few of them (more is the program's fault), and of each once in an hour. All that
    follows is an alarm."""
    node, words = message.node, snapshot.memory.users_words
    if isinstance(message, WrongResults):
        kind, may_be = WRONG_RESULTS, node in job.all_nodes
    elif message.goes_on:
        # The job may have given the node back: it was seen to have it when it named it first.
        left = any((one.kind, one.job) == (LEFT_OUT, job.id) for one in words.get(node, ()))
        kind, may_be = EATS_ATTEMPTS, left
    else:
        known = snapshot.supervised.get(job.id)
        announced = known.nodes if known is not None and known.restarts == job.restarts else ()
        # It leaves the node in this very moment.
        kind, may_be = LEFT_OUT, node in job.all_nodes or node in announced
    mine = {
        name: [one.at for one in told if (one.kind, one.job) == (kind, job.id)]
        for name, told in words.items()
    }
    named = {name for name, times in mine.items() if times}
    is_new = snapshot.now - max(mine.get(node, ()), default=-math.inf) >= NAMED_AGAIN_SECONDS
    if may_be and is_new and (node in named or len(named) < MOST_NAMED_NODES):
        yield NoteJob(job.id, kind, one_line(message.text), node, job.uid)


def pause_of(heard: InboxMessage, message: PauseRequest) -> NotePause:
    """Return an administrator's pause, or its end. It counts also while Slurm cannot be read."""
    return NotePause(one_line(message.reason), heard.connection.uid)


def _review_missing(snapshot: ClusterSnapshot) -> Iterator[NoteMissing]:
    """Remember since when a node that we know is not listed: one listing may lack it by chance."""
    tables = (snapshot.incidents, snapshot.at_rest, snapshot.agents, snapshot.heard.known_agents)
    # Nearly always each node that is known is listed, too.
    unlisted = {
        name
        for table in tables
        if not table.keys() <= snapshot.nodes.keys()
        for name in table
        if name not in snapshot.nodes
    }
    for name in sorted(unlisted):
        if name not in snapshot.memory.missing:
            yield NoteMissing(name, snapshot.now)
    for name in snapshot.memory.missing:
        if name in snapshot.nodes or name not in unlisted:
            yield NoteMissing(name, 0.0)


def is_removed(snapshot: ClusterSnapshot, name: str) -> bool:
    """Tell whether Slurm does not know the node any more."""
    since = snapshot.memory.missing.get(name, snapshot.now)
    return name not in snapshot.nodes and snapshot.now - since >= REMOVED_AFTER_SECONDS


def _review_agents(snapshot: ClusterSnapshot) -> Iterator[Note]:
    known_agents = snapshot.heard.known_agents
    nodes, looked_at = snapshot.nodes, notable(snapshot.nodes)
    # The journal knows the calm ones as they are.
    names = [name for name in snapshot.agents if name in looked_at or name not in nodes]
    for name in names:
        agent = snapshot.agents[name]
        known = known_agents.get(name)
        seen = KnownAgent(name, agent.boot_id, agent.instance, agent.drivers)
        if name not in snapshot.nodes:
            if is_removed(snapshot, name):
                yield DropAgent(name, is_removed=True)
        elif agent.was_stopped and known is not None:
            # Stopped on purpose: after a restart of ours its silence is still expected.
            yield DropAgent(name, is_removed=False)
        elif agent.is_heard and known != seen:
            yield NoteAgent(seen)


def _review_answers(snapshot: ClusterSnapshot) -> Iterator[DropAnswers]:
    """Drop the answers to what a check had found, and does not find any more."""
    for name, answered in snapshot.memory.acknowledged.items():
        agent = snapshot.agents.get(name)
        if agent is None or not (agent.is_heard and agent.reported):
            continue
        held = {found.key for found in agent.findings}
        gone = tuple(
            found
            for found in answered
            if found[0] == agent.boot_id and found[1] in agent.judged and found[1:] not in held
        )
        if gone:
            yield DropAnswers(name, gone)


def one_line(text: str) -> str:
    """Make a user's text fit for the journal: one line, of bounded length."""
    return " ".join(text.split())[:MAX_TEXT]
