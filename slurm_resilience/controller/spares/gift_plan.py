"""Decide which jobs are given spares. Pure: a snapshot and diagnoses in, actions out.

A spare stays in its pool's reservation until its job has it, so none is ever open to the queue. On
a full cluster a job that is requeued keeps what it has left, with a spare or until its lost node is
back: it would wait behind the whole queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurm_resilience.config import Config, SparePoolSettings
from slurm_resilience.controller.actions import AskForGift, MarkNode
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.spares.gift_lifecycle import GiftEvent, GiftState
from slurm_resilience.controller.spares.pool_lifecycle import PoolState
from slurm_resilience.controller.spares.pool_plan import reserved_by_others, zone_of
from slurm_resilience.controller.spares.pool_records import Gift, MoveGift
from slurm_resilience.model import Job
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.slurm.reservations import Reservation

GIFT_SECONDS = 30.0
"""A job that has not taken its spares after so long gets them no more."""
REQUEUE_GIFT_SECONDS = 120.0
"""The same for a job that is requeued. Where its batch host is dead, Slurm takes some 20 s to end
the run (COMPLETING)."""
REPAIR_GIFT_SECONDS = 900.0
"""The same where the job's own lost node has to come back first."""
REQUEUED_SECONDS = 30.0
"""After which a job that still runs is taken for one that is not requeued: Slurm does not tell
which jobs outlive a lost node (--no-kill)."""
AGAIN_SECONDS = 60.0
"""After a gift that was not taken, until the job is given another one."""
MOST_TRIES = 3
"""Gifts in a row that a job may leave."""
GIFT_PREFIX = "sres-gift-"
SOUND = frozenset({"healthy", "unknown"})


def settle_gifts(snapshot: ClusterSnapshot) -> Iterator[MoveGift]:
    """Tell what has become of the gifts; nothing while reservations cannot be read."""
    shown = snapshot.site.reservations
    if shown is None:
        return
    by_name = {one.name: one for one in shown}
    for gift in snapshot.memory.spares.open_gifts:
        yield from _settle_gift(gift, by_name.get(gift.name))


def _settle_gift(gift: Gift, seen: Reservation | None) -> Iterator[MoveGift]:
    match gift.state:
        case GiftState.MAKING if seen is not None:
            yield MoveGift(gift, GiftEvent.MADE, f"{gift.name} is there", seen.terms)
        case GiftState.ENDING if seen is None:
            yield MoveGift(gift, GiftEvent.ENDED, f"{gift.name} is deleted")
        case GiftState.READY | GiftState.OFFERED | GiftState.ENDING if seen is not None:
            if gift.terms and (seen.terms != gift.terms or set(seen.nodes) != set(gift.nodes)):
                text = f"{gift.name} was changed by a person, and is left alone"
                yield MoveGift(gift, GiftEvent.PERSON, text)


def gifts(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    marks: Sequence[MarkNode],
    settled: Collection[int] = (),
) -> Iterator[AskForGift]:
    """Bring the gifts on their way to an end, and make new ones.

    Args:
        snapshot: the observation.
        diagnoses: of the snapshot.
        config: the pools (`[spares]`).
        marks: nodes that are marked now; Slurm requeues jobs of some.
        settled: jobs whose gift has just changed its state.
    """
    memory = snapshot.memory.spares
    if snapshot.site.reservations is None:
        return
    for gift in memory.open_gifts:
        if gift.job not in settled:
            yield from _go_on(snapshot, gift)
    given = {name for gift in memory.open_gifts for name in gift.spares}
    wishes = (*_exchanges(snapshot), *_requeues(snapshot, diagnoses, marks))
    # Of a job that waits for a node, and is now to be requeued, the latter counts.
    for wish in {wish.job.id: wish for wish in wishes}.values():
        if not _may_be_given(snapshot, wish):
            continue
        made = _with_spares(snapshot, diagnoses, config, wish, given)
        text = f"{','.join(made.spares)} for job {made.job}" if made is not None else ""
        if made is None:
            made = _with_broken(snapshot, diagnoses, wish)
            text = f"job {wish.job.id} keeps {fold(wish.own)} until {fold(wish.broken)} is back"
        if made is not None:
            given.update(made.spares)
            yield AskForGift(made, GiftEvent.MAKE, text)


def _go_on(snapshot: ClusterSnapshot, gift: Gift) -> Iterator[AskForGift]:
    job = snapshot.jobs.get(gift.job)
    age = snapshot.now - gift.since
    limit = REQUEUE_GIFT_SECONDS if gift.is_requeue else GIFT_SECONDS
    limit = limit if gift.spares else REPAIR_GIFT_SECONDS
    is_there = any(one.name == gift.name for one in snapshot.site.reservations or ())
    if gift.state is GiftState.ENDING:
        yield AskForGift(gift, GiftEvent.END, "", is_begun=True)
    elif job is None:
        yield AskForGift(gift, GiftEvent.END, "the job is gone")
    elif has_taken(snapshot, gift, job):
        yield AskForGift(gift, GiftEvent.END, f"job {job.id} has its nodes", is_taken=True)
    elif not 0 <= age < limit:
        yield AskForGift(gift, GiftEvent.END, f"not taken within {limit:.0f} s")
    elif not gift.spares and _lives_on(snapshot, gift, job):
        yield AskForGift(gift, GiftEvent.END, f"job {job.id} is not requeued")
    elif not gift.spares and (name := _waits_in_vain_for(snapshot, gift)):
        yield AskForGift(gift, GiftEvent.END, f"only a person can bring {name} back")
    elif gift.state is GiftState.MAKING:
        yield AskForGift(gift, GiftEvent.MAKE, "", is_begun=True)
    elif not is_there:
        yield AskForGift(gift, GiftEvent.END, f"{gift.name} was deleted")
    elif gift.state is GiftState.READY:
        yield AskForGift(gift, GiftEvent.OFFERED, "")


def has_taken(snapshot: ClusterSnapshot, gift: Gift, job: Job) -> bool:
    """Tell whether a job has the spares that it was given, itself or in a companion."""
    if gift.is_requeue:
        return job.state == "RUNNING" and job.restarts > gift.restarts
    has_companion = any(
        other.reservation == gift.name and other.is_batch and other.state == "RUNNING"
        for other in snapshot.jobs.values()
    )
    return has_companion or bool(set(gift.spares) & set(job.nodes))


def _lives_on(snapshot: ClusterSnapshot, gift: Gift, job: Job) -> bool:
    """Tell whether a job goes on in the run in which it lost its nodes."""
    runs = job.state == "RUNNING" and job.restarts == gift.restarts and not job.is_zombie
    waited = snapshot.now - gift.since > REQUEUED_SECONDS
    return runs and (waited or _has_companion(snapshot, job))


def _waits_in_vain_for(snapshot: ClusterSnapshot, gift: Gift) -> str:
    """Return a node of a gift that is out of service and is not being repaired; empty: none is.

    Its job would find other nodes, were it not bound to these.
    """
    if snapshot.now - gift.since <= REQUEUED_SECONDS:
        return ""  # one that has just been given back may not be in service yet
    for name in gift.nodes:
        node, known = snapshot.nodes.get(name), snapshot.incidents.get(name)
        is_repaired = known is not None and known.state.is_under_way
        if node is not None and not node.is_available and not is_repaired:
            return name
    return ""


def _has_companion(snapshot: ClusterSnapshot, job: Job) -> bool:
    """Tell whether a job has asked for a second allocation: it needs the nodes that come back. Not
    by one that an elastic step grows by: that is given back when others need its nodes."""
    return any(
        other.companion_of == (job.id, job.restarts) and other.uid == job.uid and not other.is_lent
        for other in snapshot.jobs.values()
    )


class Wish(NamedTuple):
    """A job that lacks nodes."""

    job: Job
    own: tuple[str, ...]
    """Sound nodes that it has, and is to have again."""
    lost: tuple[str, ...]
    """Nodes that it lost, or is about to leave."""
    lacks: int
    restarts: int
    """The job's in the run in which it lost its nodes."""
    is_requeue: bool
    broken: tuple[str, ...] = ()
    """Those of the lost that are being repaired."""


def _exchanges(snapshot: ClusterSnapshot) -> Iterator[Wish]:
    """Find supervised jobs that lost nodes to faults, and may wait for others: in exchange, or in a
    second allocation beside them.

    Only nodes that a job lost to a fault count: a user cannot bring that about to jump the queue.
    """
    waiting = Counter(
        (job.uid, job.partition, job.num_nodes)
        for job in snapshot.jobs.values()
        if job.state == "PENDING"
    )
    for entry in snapshot.supervised.values():
        job = snapshot.jobs.get(entry.job)
        if job is None or job.state != "RUNNING" or job.restarts != entry.restarts:
            continue
        lacks = min(len(entry.lost), entry.size - len(job.nodes))
        is_asked_for = waiting[(job.uid, job.partition, lacks)] > 0
        if job.nodes and lacks > 0 and is_asked_for:
            yield Wish(job, (), entry.lost, lacks, job.restarts, False)


def _requeues(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], marks: Sequence[MarkNode]
) -> Iterator[Wish]:
    """Find jobs that are requeued for a fault, and keep the sound nodes that they still have."""
    lost = {name for name, found in notable(diagnoses).items() if found.kind not in SOUND}
    lost |= {mark.node for mark in marks} | snapshot.incidents.keys()
    numbers = [*(job for mark in marks for job in mark.requeued), *snapshot.pending_requeues]
    # Without its batch host a job is requeued in this very cycle.
    numbers += [job.id for job in snapshot.jobs.values() if job.is_zombie and job.requeue]
    for number in dict.fromkeys(numbers):
        job, entry = snapshot.jobs.get(number), snapshot.supervised.get(number)
        if job is None or entry is None or not (entry.lost or lost.intersection(entry.nodes)):
            continue  # without a lost node nothing is given: a user's program may ask for a requeue
        gone = tuple(dict.fromkeys((*entry.lost, *(n for n in entry.nodes if n in lost))))
        pending = snapshot.pending_requeues.get(number)
        before = pending.restarts_before if pending else job.restarts
        if job.waits_for_nodes:
            yield Wish(job, (), gone, job.num_nodes, before, True)
        elif job.restarts == before:
            own = [n for n in job.nodes if n not in lost and _has_alone(snapshot, job, n)]
            size = max(entry.size, job.num_nodes, len(job.nodes))
            broken = _repaired(snapshot, job, gone, marks)
            yield Wish(job, tuple(own), gone, size - len(own), before, True, broken)


def _repaired(
    snapshot: ClusterSnapshot, job: Job, lost: Sequence[str], marks: Sequence[MarkNode]
) -> tuple[str, ...]:
    """Return the lost nodes that come back without a person, and that no other job has."""
    back = {mark.node for mark in marks if mark.action}
    back |= {name for name, known in snapshot.incidents.items() if known.state.is_under_way}
    back &= snapshot.nodes.keys()
    return tuple(n for n in lost if n in back and not _is_shared(snapshot, job, n))


def _has_alone(snapshot: ClusterSnapshot, job: Job, name: str) -> bool:
    node = snapshot.nodes.get(name)
    return node is not None and node.is_available and not _is_shared(snapshot, job, name)


def _is_shared(snapshot: ClusterSnapshot, job: Job, name: str) -> bool:
    return any(name in other.nodes and other.id != job.id for other in snapshot.jobs.values())


def _may_be_given(snapshot: ClusterSnapshot, wish: Wish) -> bool:
    """Tell whether a job gets spares now: it has no gift, and has not left too many."""
    job, known = wish.job, snapshot.memory.spares.gifts.get(wish.job.id)
    if wish.lacks <= 0 or job.reservation:
        return False
    if job.partition not in snapshot.memory.spares.pools and not wish.is_requeue:
        return False
    if known is None or known.restarts != wish.restarts or known.tries == 0:
        return known is None or not known.state.is_open
    is_soon = 0 <= snapshot.now - known.since < AGAIN_SECONDS
    return not known.state.is_open and known.tries < MOST_TRIES and not is_soon


def _with_spares(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    wish: Wish,
    given: Collection[str],
) -> Gift | None:
    """Return a gift with as many spares as a job lacks; None: the pool does not have them."""
    job, pool = wish.job, snapshot.memory.spares.pools.get(wish.job.partition)
    settings = config.spares.get(job.partition)
    if settings is None or pool is None:
        return None
    if pool.state not in (PoolState.KEPT, PoolState.CHANGING):
        return None
    shown = snapshot.site.reservations or ()
    kept = {name for one in shown if one.name == pool.name for name in one.nodes}
    taken = reserved_by_others(snapshot, pool.name)
    ready = [
        name
        for name in pool.nodes
        if name in kept
        and name not in given
        and name not in taken
        and name not in job.excluded_nodes
        if _is_ready(snapshot, diagnoses, name)
    ]
    zones = {name: zone_of(snapshot, snapshot.nodes[name], settings.zone) for name in ready}
    of_lost, of_kept = (_count_zones(snapshot, settings, n) for n in (wish.lost, job.nodes))
    # In the block of the node that was lost, and else near those that the job keeps: its ranks were
    # placed so.
    ready.sort(key=lambda name: (-of_lost[zones[name]], -of_kept[zones[name]]))
    if len(ready) < wish.lacks:
        return None
    spares = tuple(sorted(ready[: wish.lacks]))
    return _gift(snapshot, wish, (*wish.own, *spares), spares)


def _with_broken(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], wish: Wish
) -> Gift | None:
    """Return a gift of what a job has left and of the nodes that it lost; None: these do not come
    back by themselves, or enough others are idle, on which it starts at once."""
    job = wish.job
    nodes = (*wish.own, *wish.broken[: wish.lacks])
    taken = {*reserved_by_others(snapshot, ""), *job.excluded_nodes}
    if not wish.own or len(wish.broken) < wish.lacks or taken.intersection(nodes):
        return None
    if _has_companion(snapshot, job):
        return None
    idle = [
        name
        for name, node in snapshot.nodes.items()
        if name not in taken and job.partition in node.partitions
        if _is_ready(snapshot, diagnoses, name)
    ]
    if len(idle) >= wish.lacks:
        return None
    return _gift(snapshot, wish, nodes)


def _gift(
    snapshot: ClusterSnapshot, wish: Wish, nodes: Sequence[str], spares: tuple[str, ...] = ()
) -> Gift:
    job = wish.job
    known = snapshot.memory.spares.gifts.get(job.id)
    before = known.tries if known is not None and known.restarts == wish.restarts else 0
    return Gift(
        job=job.id,
        name=f"{GIFT_PREFIX}{job.id}-{int(snapshot.now * 1000):x}",
        uid=job.uid,
        restarts=wish.restarts,
        partition=job.partition,
        nodes=tuple(sorted(set(nodes))),
        spares=spares,
        is_requeue=wish.is_requeue,
        tries=before + 1,
    )


def _count_zones(
    snapshot: ClusterSnapshot, settings: SparePoolSettings, names: Iterable[str]
) -> Counter[str]:
    """Count the nodes in each failure domain that is known."""
    known = (snapshot.nodes[name] for name in names if name in snapshot.nodes)
    return Counter(zone for node in known if (zone := zone_of(snapshot, node, settings.zone)))


def _is_ready(snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], name: str) -> bool:
    node = snapshot.nodes.get(name)
    return (
        node is not None
        and node.is_available
        and not node.has_work
        and diagnoses[name].kind in SOUND
        and name not in snapshot.incidents
    )
