"""Decide which nodes are kept as spares. Pure: a snapshot and diagnoses in, actions out.

Each change of a reservation is written down before Slurm is asked for it. What Slurm shows decides
what has become of it: the old nodes, the new ones, or neither; then a person has changed it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from slurm_resilience.config import Config, SparePoolSettings
from slurm_resilience.controller.actions import AskForPool
from slurm_resilience.controller.diagnose import NodeDiagnosis, is_kept_instead
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.spares.pool_lifecycle import PoolEvent, PoolState
from slurm_resilience.controller.spares.pool_records import MovePool, SparePool
from slurm_resilience.model import Node
from slurm_resilience.slurm.reservations import Reservation, is_over

RETRY_SECONDS = 10.0
"""After Slurm has refused a request, until it is asked once more."""
PREFIX = "sres-spares-"
FIT = frozenset({"healthy", "unknown", "suspect"})
"""Diagnoses with which a node stays a spare."""


def size_of(settings: SparePoolSettings, nodes: int) -> int:
    """Return how many spares a partition of so many nodes is to have: not all of them, for no job
    would start there any more."""
    return min(wished_of(settings, nodes), max(0, nodes - 1))


def wished_of(settings: SparePoolSettings, nodes: int) -> int:
    """Return how many spares the configuration asks for in a partition of so many nodes."""
    return settings.nodes or math.ceil(nodes * settings.percent / 100.0)


def zone_of(snapshot: ClusterSnapshot, node: Node, prefix: str) -> str:
    """Return a node's failure domain: the feature that begins so, or where no beginning is
    configured the leaf switch or block of Slurm's topology; empty: none is known."""
    if not prefix:
        return snapshot.site.domains.get(node.name, "")
    return next((name for name in node.features if name.startswith(prefix)), "")


def choose(
    size: int, members: Sequence[str], candidates: Sequence[str], zones: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the spares from now on: as many members as may stay, filled up from the candidates.

    Args:
        size: as many at most.
        members: spares that may stay; of too many, those of the fullest zone go.
        candidates: may become spares, the best ones first; each goes to the zone with the fewest.
        zones: of all of them.
    """
    chosen = list(dict.fromkeys(members))
    count = Counter(zones.get(name, "") for name in chosen)
    while len(chosen) > size:
        fullest = max(reversed(chosen), key=lambda name: count[zones.get(name, "")])
        chosen.remove(fullest)
        count[zones.get(fullest, "")] -= 1
    left = [name for name in dict.fromkeys(candidates) if name not in chosen]
    while left and len(chosen) < size:
        best = min(left, key=lambda name: count[zones.get(name, "")])
        left.remove(best)
        chosen.append(best)
        count[zones.get(best, "")] += 1
    return tuple(sorted(chosen))


def spread(
    chosen: Sequence[str],
    fixed: Collection[str],
    free: Sequence[str],
    zones: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the spares once those of the fullest zones are exchanged for free nodes of emptier
    ones, as far as that evens them out: the other zones may have been away, or full of jobs, when
    they were chosen.

    Args:
        chosen: the spares.
        fixed: those that stay.
        free: may become spares, the best ones first.
        zones: of all of them. A node whose zone is not known is exchanged for none.
    """
    spares = list(chosen)
    count = Counter(zones.get(name, "") for name in spares)
    left = [name for name in dict.fromkeys(free) if zones.get(name) and name not in spares]
    while left and max(count.values(), default=0) > 1:
        movable = [name for name in reversed(spares) if name not in fixed]
        best = min(left, key=lambda name: count[zones[name]])
        worst = max(movable, key=lambda name: count[zones.get(name, "")], default="")
        if not worst or count[zones.get(worst, "")] < count[zones[best]] + 2:
            break
        spares[spares.index(worst)] = best
        left.remove(best)
        count[zones.get(worst, "")] -= 1
        count[zones[best]] += 1
    return tuple(sorted(spares))


def settle(snapshot: ClusterSnapshot) -> Iterator[MovePool]:
    """Tell what Slurm has made of the last requests, or people of the reservations; nothing while
    reservations cannot be read."""
    shown = snapshot.site.reservations
    for pool in snapshot.memory.spares.pools.values() if shown is not None else ():
        yield from _settle(snapshot, pool, _find(shown or (), pool.name))


def pools(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    settled: Collection[str] = (),
) -> Iterator[AskForPool]:
    """Keep each pool as the configuration has it; nothing while reservations cannot be read.

    Args:
        snapshot: the observation.
        diagnoses: of the snapshot.
        config: the pools (`[spares]`).
        settled: partitions whose pool has just changed its state: they are decided in the next
            cycle, on what stands in the journal then.
    """
    if snapshot.site.reservations is None:
        return
    known = snapshot.memory.spares.pools
    for partition in dict.fromkeys((*config.spares, *known)):
        pool = known.get(partition) or SparePool(partition)
        if partition not in settled:
            yield from _bring_about(snapshot, pool, target(snapshot, diagnoses, config, pool))


def _find(shown: Sequence[Reservation], name: str) -> Reservation | None:
    return next((one for one in shown if name and one.name == name), None)


def _settle(
    snapshot: ClusterSnapshot, pool: SparePool, seen: Reservation | None
) -> Iterator[MovePool]:
    match pool.state:
        case PoolState.HELD:
            return
        case PoolState.ABSENT | PoolState.MAKING if seen is None:
            # Slurm's answer is missing: it is asked again, under the same name. A person who has
            # deleted it before any look showed it cannot be told from a request that was lost.
            return
        case PoolState.REMOVING if seen is None:
            yield MovePool(pool.partition, PoolEvent.REMOVED, "its reservation is deleted")
        case PoolState.KEPT if seen is None and is_over(pool.terms, snapshot.now):
            text = f"the year of {pool.name} is over, and it is made anew"
            yield MovePool(pool.partition, PoolEvent.REMOVED, text)
        case _ if seen is None:
            yield _held(pool, f"its reservation {pool.name} was deleted")
        case PoolState.ABSENT | PoolState.MAKING if set(seen.nodes) == set(pool.wanted):
            text = f"{_listed(seen.nodes)} are kept in {pool.name}"
            yield MovePool(pool.partition, PoolEvent.MADE, text, seen.nodes, seen.terms)
        case PoolState.ABSENT | PoolState.MAKING:
            yield _held(pool, f"{pool.name} was changed to {_listed(seen.nodes)}")
        case PoolState.KEPT if not pool.terms and set(seen.nodes) == set(pool.nodes):
            text = f"Slurm shows {pool.name}"
            yield MovePool(pool.partition, PoolEvent.MADE, text, seen.nodes, seen.terms)
        case _ if pool.terms and seen.terms != pool.terms:
            yield _held(pool, f"{pool.name} was changed: {_difference(pool.terms, seen.terms)}")
        case _:
            yield from _compare_nodes(snapshot, pool, seen)


def _compare_nodes(
    snapshot: ClusterSnapshot, pool: SparePool, seen: Reservation
) -> Iterator[MovePool]:
    """Compare the nodes of a reservation that Slurm shows with those that it had, and those that
    were asked for. A request may take effect after its answer was waited for."""
    shown, before = set(seen.nodes), _configured(snapshot, pool.nodes, seen.nodes)
    if shown != set(pool.nodes) and shown in (set(pool.wanted), before):
        yield MovePool(
            pool.partition, PoolEvent.CHANGED, f"{_listed(seen.nodes)} are kept", seen.nodes
        )
    elif shown != before:
        yield _held(pool, f"the nodes of {pool.name} were changed to {_listed(seen.nodes)}")
    elif pool.state is PoolState.CHANGING:
        text = "Slurm shows the nodes that it had"
        yield MovePool(pool.partition, PoolEvent.UNCHANGED, text, seen.nodes)


def _held(pool: SparePool, text: str) -> MovePool:
    return MovePool(pool.partition, PoolEvent.PERSON, text)


def _configured(
    snapshot: ClusterSnapshot, nodes: Collection[str], shown: Collection[str]
) -> set[str]:
    """Leave out the nodes that are out of Slurm's configuration, and so of every reservation."""
    return {name for name in nodes if name in snapshot.nodes or name in shown}


def _bring_about(
    snapshot: ClusterSnapshot, pool: SparePool, wanted: tuple[str, ...]
) -> Iterator[AskForPool]:
    """Ask Slurm for what is missing: at most one request at a time, and none too soon after a
    refusal."""
    if pool.refused_at and 0 <= snapshot.now - pool.refused_at < RETRY_SECONDS:
        return
    partition = pool.partition
    match pool.state:
        case PoolState.ABSENT if wanted:
            # The time tells it from every other: no person can have made one of this name before.
            name = f"{PREFIX}{partition}-{int(snapshot.now * 1000):x}"
            yield AskForPool(partition, PoolEvent.MAKE, name, wanted)
        case PoolState.MAKING:
            yield AskForPool(partition, PoolEvent.MAKE, pool.name, pool.wanted, is_begun=True)
        case PoolState.REMOVING:
            yield AskForPool(partition, PoolEvent.REMOVE, pool.name, is_begun=True)
        case PoolState.KEPT if not wanted:
            yield AskForPool(partition, PoolEvent.REMOVE, pool.name)
        case PoolState.KEPT if set(wanted) != set(pool.nodes):
            yield AskForPool(partition, PoolEvent.CHANGE, pool.name, wanted)


def target(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    pool: SparePool,
) -> tuple[str, ...]:
    """Return the nodes that a pool should have now."""
    settings = config.spares.get(pool.partition)
    if settings is None:
        return ()
    there = [node for node in snapshot.nodes.values() if pool.partition in node.partitions]
    taken = reserved_by_others(snapshot, pool.name)
    # A spare on its way to a job stays here until the job has it.
    given = {name for gift in snapshot.memory.spares.open_gifts for name in gift.nodes}
    members = [
        name for name in pool.nodes if may_stay(snapshot, diagnoses, pool, name, taken - given)
    ]
    free = [node.name for node in there if _is_free(snapshot, diagnoses, node, taken)]
    # On a full cluster no node is ever seen idle, but those that come back from a repair.
    back = [node.name for node in there if _comes_back(snapshot, node, taken)]
    zones = {node.name: zone_of(snapshot, node, settings.zone) for node in there}
    chosen = choose(size_of(settings, len(there)), members, (*free, *back), zones)
    return spread(chosen, given, free, zones)


def reserved_by_others(snapshot: ClusterSnapshot, name: str) -> frozenset[str]:
    """Return the nodes of all reservations but this one, those that are only planned too."""
    shown = snapshot.site.reservations or ()
    return frozenset(node for one in shown if one.name != name for node in one.nodes)


def may_stay(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    pool: SparePool,
    name: str,
    taken: Collection[str],
) -> bool:
    """Tell whether a spare stays one: it has no job, no fault, and no person wants it otherwise."""
    node = snapshot.nodes.get(name)
    if node is None:
        return True  # one listing may lack it by chance
    if pool.partition not in node.partitions or name in taken or node.has_work:
        return False
    incident = snapshot.incidents.get(name)
    if incident is not None:
        return _is_on_its_way(snapshot, node)
    # A restart of slurmctld shows all nodes so for a moment.
    responding = msgspec.structs.replace(node, flags=node.flags - {"NOT_RESPONDING"})
    return responding.is_available and diagnoses[name].kind in FIT


def _is_free(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    node: Node,
    taken: Collection[str],
) -> bool:
    """Tell whether a node can become a spare: idle, sound, and in no reservation."""
    return (
        node.base == "IDLE"
        and node.is_available
        and not node.has_work
        and diagnoses[node.name].kind == "healthy"
        and node.name not in snapshot.incidents
        and node.name not in taken
        and node.name not in snapshot.memory.kept
    )


def _comes_back(snapshot: ClusterSnapshot, node: Node, taken: Collection[str]) -> bool:
    return _is_on_its_way(snapshot, node) and not node.has_work and node.name not in taken


def _is_on_its_way(snapshot: ClusterSnapshot, node: Node) -> bool:
    """Tell whether a node comes back from its repair, and no person keeps it for anything else."""
    incident = snapshot.incidents.get(node.name)
    return (
        incident is not None
        and incident.state.is_coming_back
        and "MAINTENANCE" not in node.flags
        and not is_kept_instead(node, incident.action, snapshot.site.slurm_users)
    )


def resumed(snapshot: ClusterSnapshot) -> Iterator[MovePool]:
    """Take the reservations that people have changed as Slurm shows them now, by their word."""
    shown = snapshot.site.reservations
    for pool in snapshot.memory.spares.pools.values():
        if pool.state is not PoolState.HELD or shown is None:
            continue
        seen = _find(shown, pool.name)
        if seen is None:
            text = "by a person's word; its reservation is gone"
            yield MovePool(pool.partition, PoolEvent.FORGOTTEN, text)
        else:
            text = f"by a person's word, with {_listed(seen.nodes)}"
            yield MovePool(pool.partition, PoolEvent.RESUMED, text, seen.nodes, seen.terms)


def _difference(before: str, after: str) -> str:
    """Return the words that are others now."""
    return " ".join(word for word in after.split() if word not in before.split()) or "less is set"


def _listed(nodes: Sequence[str]) -> str:
    return ",".join(nodes) or "no node"
