"""Decide, for faults that come together: whether they look like one fault of ours or the network's.
Pure.

The breaker counts faults in sliding windows, which the journal keeps. While it is tripped, no node
is marked or replaced but as `marking` and `replacing` say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from slurm_resilience.config import BreakerSettings, Config
from slurm_resilience.controller.actions import Note, NoteBreaker, NoteFault, RaiseAlarm
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal.records import HOUR_SECONDS, BreakerState, Fault
from slurm_resilience.controller.observe import ClusterSnapshot

SHOWN_NODES = 20
"""An alarm names this many."""


class BreakerReview(NamedTuple):
    """The faults and the breaker's state from now on, with what the journal must learn."""

    faults: Mapping[str, Fault]
    state: BreakerState
    notes: tuple[Note, ...] = ()


def review(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> BreakerReview:
    """Count this cycle's faults in, and trip or close the breaker.

    Args:
        snapshot: the observation, with the faults and the breaker's state from before.
        diagnoses: of the snapshot.
        config: limits (`[breaker]`).
    """
    present = _present(snapshot, _not_left_alone(snapshot, diagnoses, config))
    faults, notes = dict(snapshot.memory.faults), list[Note]()
    is_news = any(name not in faults or faults[name].is_over for name in present)
    rare = _rare_drivers(snapshot) if is_news else frozenset[str]()
    for name, cause in present.items():
        fault = _as_it_counts(snapshot, name, cause, rare)
        if fault != faults.get(name):
            faults[name] = fault
            notes.append(NoteFault(fault))
    for name, fault in snapshot.memory.faults.items():
        if name in present or (name not in snapshot.nodes and not fault.is_over):
            continue
        if not fault.is_over:
            faults[name] = msgspec.structs.replace(fault, is_over=True)
            notes.append(NoteFault(faults[name]))
        elif snapshot.now - fault.began >= HOUR_SECONDS:
            del faults[name]
            notes.append(NoteFault(fault, is_forgotten=True))
    counted = [fault for fault in faults.values() if fault.began > snapshot.memory.breaker.reset_at]
    # When it closes, those that last are marked together: they count as if they began now.
    lasting = [
        msgspec.structs.replace(faults[name], began=snapshot.now)
        for name in present
        if faults[name].began > snapshot.memory.breaker.reset_at
    ]
    excess = _excess(counted, snapshot.now, config.breaker)
    is_storm = bool(_excess(lasting, snapshot.now, config.breaker))
    state = _next_state(snapshot.memory.breaker, excess, is_storm, snapshot.now, config.breaker)
    if state != snapshot.memory.breaker:
        notes.append(NoteBreaker(state))
    if snapshot.memory.breaker.is_tripped and not state.is_tripped:
        faults |= {fault.node: fault for fault in lasting}
        notes += [NoteFault(fault) for fault in lasting]
    return BreakerReview(faults, state, tuple(notes))


def _rare_drivers(snapshot: ClusterSnapshot) -> frozenset[str]:
    """Return the drivers, with their versions, that most nodes do not have: new ones that are being
    rolled out, say. What all have is no reason for which some fail."""
    count = Counter(driver for agent in snapshot.agents.values() for driver in agent.drivers)
    return frozenset(driver for driver in count if 2 * count[driver] < len(snapshot.agents))


def _as_it_counts(snapshot: ClusterSnapshot, name: str, cause: str, rare: Collection[str]) -> Fault:
    """Return a fault that is present. Those that a pause has kept from being marked are marked
    together at its end: they count as if they began then, but for those that a person answered."""
    known, incident = snapshot.memory.faults.get(name), snapshot.incidents.get(name)
    is_paused = bool(snapshot.paused)
    if known is None or known.is_over:
        partitions, domain = snapshot.nodes[name].partitions, snapshot.site.domains.get(name, "")
        agent = snapshot.agents.get(name)
        drivers = tuple(d for d in agent.drivers if d in rare) if agent is not None else ()
        return Fault(name, cause, partitions, snapshot.now, False, is_paused, domain, drivers)
    if is_paused:
        is_marked = incident is not None and incident.state.is_marked
        return msgspec.structs.replace(known, waits_for_pause=not is_marked)
    is_answered = known.began <= snapshot.memory.breaker.reset_at
    began = snapshot.now if known.waits_for_pause and not is_answered else known.began
    return msgspec.structs.replace(known, began=began, waits_for_pause=False)


def _not_left_alone(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> Mapping[str, NodeDiagnosis]:
    """Leave out the nodes with the mode `none`: a rack of them that is switched off must not keep
    the others from their repair."""
    recovery = config.recovery
    if "none" not in (recovery.mode, *recovery.partitions.values(), *recovery.nodes.values()):
        return diagnoses
    return {
        name: diagnosis
        for name, diagnosis in notable(diagnoses).items()
        if recovery.mode_of(name, snapshot.nodes[name].partitions) != "none"
    }


def _present(snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis]) -> dict[str, str]:
    """Return the nodes that are faulty now by sresctld's own judgement, each with its cause.

    A node that Slurm has had DOWN before we saw its fault is no news. One that a person asked for,
    or that is being replaced, is no fault.
    """
    present = {}
    for name, diagnosis in notable(diagnoses).items():
        incident = snapshot.incidents.get(name)
        if incident is None and diagnosis.kind not in ("dead", "sick"):
            continue  # nearly every node, in every round
        node = snapshot.nodes[name]
        known = snapshot.memory.faults.get(name)
        is_known = known is not None and not known.is_over
        if incident is None:
            is_faulty = (is_known or not node.is_down) and (
                node.has_work or name not in snapshot.at_rest
            )
        else:
            is_ours = incident.kind in ("dead", "sick")
            waits = incident.state is NodeState.SUSPECT or incident.state.waits_for_repair
            is_faulty = is_ours and waits and (is_known or incident.state is NodeState.SUSPECT)
        if is_faulty:
            present[name] = diagnosis.cause or (known.cause if known is not None else "")
    return present


def _excess(faults: Collection[Fault], now: float, limits: BreakerSettings) -> str:
    """Return which limit the faults exceed, in words; empty: none."""
    for seconds, of_cluster, of_partition in (
        (limits.window, limits.nodes_at_once, limits.partition_at_once),
        (HOUR_SECONDS, limits.nodes_per_hour, limits.partition_per_hour),
    ):
        recent = [fault for fault in faults if now - fault.began < seconds]
        within = f"within {seconds:.0f} s"
        if len(recent) > of_cluster:
            return f"{len(recent)} nodes failed {within}, more than {of_cluster}"
        for name, number in _tally(recent, lambda fault: fault.partitions).items():
            if number > of_partition:
                return (
                    f"{number} nodes of partition {name} failed {within}, more than {of_partition}"
                )
    recent = [fault for fault in faults if now - fault.began < HOUR_SECONDS]
    for kind, groups, most in _in_common(limits):
        for name, number in _tally(recent, groups).items():
            if number > most:
                return f"{number} nodes {kind.format(name)} within an hour, more than {most}"
    return ""


_Groups = Callable[[Fault], tuple[str, ...]]


def _in_common(limits: BreakerSettings) -> tuple[tuple[str, _Groups, int], ...]:
    """Return what the nodes that failed may have in common, in words, with its limit."""
    return (
        (
            "have the same finding ({})",
            lambda fault: (fault.cause,) if fault.cause else (),
            limits.check_per_hour,
        ),
        (
            "of one switch or block ({}) failed",
            lambda fault: (fault.domain,) if fault.domain else (),
            limits.switch_per_hour,
        ),
        (
            "with a driver that most do not have ({}) failed",
            lambda fault: fault.drivers,
            limits.driver_per_hour,
        ),
    )


def _tally(faults: Collection[Fault], groups: _Groups) -> dict[str, int]:
    """Count faults by what they have in common."""
    counts: dict[str, int] = {}
    for fault in faults:
        for group in groups(fault):
            counts[group] = counts.get(group, 0) + 1
    return counts


def _next_state(
    state: BreakerState, excess: str, is_storm: bool, now: float, limits: BreakerSettings
) -> BreakerState:
    if excess:
        if state.is_tripped:
            return msgspec.structs.replace(state, storm_at=now)
        return msgspec.structs.replace(state, tripped_at=now, storm_at=now, text=excess)
    if not state.is_tripped:
        return state
    if is_storm:
        # Old by now, and still so many: it is the same storm.
        return msgspec.structs.replace(state, storm_at=now)
    if now - state.storm_at >= limits.quiet:
        return msgspec.structs.replace(state, tripped_at=0.0, storm_at=0.0, text="")
    return state


def reset(state: BreakerState, now: float) -> BreakerState:
    """Return the state after a person has reset the breaker: what failed so far is answered."""
    return msgspec.structs.replace(state, tripped_at=0.0, storm_at=0.0, text="", reset_at=now)


def alarm(state: BreakerState, faults: Mapping[str, Fault]) -> RaiseAlarm | None:
    """Return the one alarm of a storm, whose text follows the storm."""
    if not state.is_tripped:
        return None
    names = sorted(fault.node for fault in faults.values() if not fault.is_over)
    shown = ",".join(names[:SHOWN_NODES])
    more = f" and {len(names) - SHOWN_NODES} more" if len(names) > SHOWN_NODES else ""
    text = (
        f"the breaker tripped: {state.text}; that looks like a fault of the network, or "
        f"of sresctld's own. Faulty now: {shown or 'none'}{more}. No node is replaced, and none is "
        "marked but to move supervised jobs off dead nodes; see `sres breaker`"
    )
    return RaiseAlarm(f"breaker-{state.tripped_at:.3f}", text)
