"""Decide, for a fault that comes again: reboot, then replace, then leave it to a person. Pure.

The repairs of all incidents count, as far as the journal and `recovery.recurrence_window` reach. A
reboot counts for the machine that was booted: its successor under the same name begins anew. A
replacement counts for the node's name: what kills one machine after another is not the machine. And
all repairs count for the machine, which may come back from a repair under another node's name: one
that fails again and again is a lemon.
"""

from __future__ import annotations

from slurm_resilience.config import Config
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal.records import Incident, Repair
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, REPLACE


def escalated(snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis) -> NodeDiagnosis:
    """Return a diagnosis with the action that this fault calls for by now."""
    if diagnosis.action != REBOOT or diagnosis.kind != "sick":
        return diagnosis
    agent = snapshot.agents.get(diagnosis.node)
    machine = agent.instance if agent is not None else ""
    reboots = sum(
        repair.action == REBOOT and _is_of(repair, diagnosis.node, machine)
        for repair in snapshot.memory.repairs
    )
    if reboots < config.recovery.max_reboots:
        return diagnosis
    text = diagnosis.reason
    if reboots:
        text += f"; rebooted {_times(reboots)} already within {_window(config)}"
    return NodeDiagnosis(
        diagnosis.node,
        diagnosis.kind,
        text,
        REPLACE,
        diagnosis.probe,
        diagnosis.silence,
        diagnosis.cause,
    )


def is_worn_out(snapshot: ClusterSnapshot, config: Config, incident: Incident) -> str:
    """Return why a node is not repaired once more, but left to a person; empty: it may be."""
    if incident.kind == "requested":
        return ""
    machine = _machine_of(snapshot, incident)
    names = [
        repair.node
        for repair in snapshot.memory.repairs
        if machine and repair.instance == machine and repair.incident != incident.id
    ]
    if len(names) >= config.recovery.max_repairs:
        return (
            f"its machine {machine} is a lemon: repaired {_times(len(names))} within "
            f"{_window(config)} already (as {', '.join(sorted(set(names)))}), a person must look"
        )
    if incident.action != REPLACE:
        return ""
    earlier = sum(
        repair.node == incident.node and repair.action == REPLACE and repair.incident != incident.id
        for repair in snapshot.memory.repairs
    )
    if earlier < config.recovery.max_replacements:
        return ""
    return f"replaced {_times(earlier)} within {_window(config)} already, a person must look"


def _is_of(repair: Repair, node: str, machine: str) -> bool:
    """Tell whether a repair was of this machine; of the node, where its machine was not known."""
    return repair.instance == machine if repair.instance else repair.node == node


def _machine_of(snapshot: ClusterSnapshot, incident: Incident) -> str:
    agent = snapshot.agents.get(incident.node)
    return (agent.instance if agent is not None else "") or incident.before.instance


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _window(config: Config) -> str:
    hours = config.recovery.recurrence_window / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} h"
