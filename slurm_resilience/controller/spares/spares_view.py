"""The pools of spare nodes, as `sres` shows them, and the alarms about them. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import RaiseAlarm
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.spares.pool_lifecycle import PoolState
from slurm_resilience.controller.spares.pool_plan import size_of, wished_of
from slurm_resilience.controller.spares.pool_records import SparePool

RESUME = "sresctld leaves it alone until `sres spares resume`"


def spares_view(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> list[dict[str, Any]]:
    """Return each pool with its size, what is kept, and what is missing and why, as plain data."""
    known = snapshot.memory.spares.pools
    return [
        _pool_view(snapshot, diagnoses, config, known.get(partition) or SparePool(partition))
        for partition in dict.fromkeys((*config.spares, *known))
        if partition in config.spares or known[partition].state is not PoolState.ABSENT
    ]


def _pool_view(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    pool: SparePool,
) -> dict[str, Any]:
    settings = config.spares.get(pool.partition)
    there = sum(pool.partition in node.partitions for node in snapshot.nodes.values())
    size = size_of(settings, there) if settings is not None else 0
    names = _held_nodes(snapshot, pool) if pool.state is PoolState.HELD else pool.nodes
    ready = [
        name
        for name in names
        if name in snapshot.nodes
        and snapshot.nodes[name].is_available
        and not snapshot.nodes[name].has_work
        and diagnoses[name].kind in ("healthy", "unknown")
    ]
    missing = max(0, size - len(ready))
    return {
        "partition": pool.partition,
        "state": pool.state.value,
        "reservation": pool.name,
        "size": size,
        "kept": ready,
        "coming": [name for name in names if name in snapshot.incidents],
        "given": [
            {"job": gift.job, "nodes": list(gift.spares), "state": gift.state.value}
            for gift in snapshot.memory.spares.open_gifts
            if gift.partition == pool.partition
        ],
        "missing": missing,
        "why": _why(snapshot, pool, there, missing),
    }


def _held_nodes(snapshot: ClusterSnapshot, pool: SparePool) -> tuple[str, ...]:
    """Return the nodes of a reservation as a person has left it: none where it was deleted."""
    shown = snapshot.site.reservations
    if shown is None:
        return pool.nodes
    return next((one.nodes for one in shown if one.name == pool.name), ())


def _why(snapshot: ClusterSnapshot, pool: SparePool, there: int, missing: int) -> str:
    if pool.state is PoolState.HELD:
        return f"{pool.why}; {RESUME}"
    if snapshot.site.reservations is None:
        return "Slurm's reservations could not be read: nothing is changed"
    if there == 0:
        return f"Slurm has no node in a partition {pool.partition}{_nearest(snapshot, pool)}"
    if pool.refused_at:
        return f"Slurm refused: {pool.why}; it is asked again"
    if missing and pool.state in (PoolState.KEPT, PoolState.ABSENT):
        return "no more nodes are idle, sound and in no reservation"
    return ""


def _nearest(snapshot: ClusterSnapshot, pool: SparePool) -> str:
    """Return the name that `[spares.X]` may have been meant for, as a question; empty: none."""
    known = {name for node in snapshot.nodes.values() for name in node.partitions}
    near = difflib.get_close_matches(pool.partition, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def spare_alarms(snapshot: ClusterSnapshot, config: Config) -> Iterator[RaiseAlarm]:
    """Raise an alarm for each pool that a person has changed, or that would take a whole
    partition."""
    for partition, settings in config.spares.items():
        there = sum(partition in node.partitions for node in snapshot.nodes.values())
        wished, size = wished_of(settings, there), size_of(settings, there)
        if there and wished > size:
            text = (
                f"spares.{partition} asks for {wished} of the {there} nodes of partition "
                f"{partition}, which would leave none to jobs: {size} are kept"
            )
            yield RaiseAlarm(f"spares-all-{partition}", text)
    for pool in snapshot.memory.spares.pools.values():
        if pool.state is PoolState.HELD:
            text = f"the spares of partition {pool.partition} are held: {pool.why}; {RESUME}"
            yield RaiseAlarm(f"spares-{pool.name}", text)
