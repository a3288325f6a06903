"""Decide, for a fault that comes again: reboot, then replace, then leave it to a person. Pure.

The repairs of all incidents count, as far as the journal and `recovery.recurrence_window` reach. A
reboot counts for the machine that was booted: its successor under the same name begins anew. A
replacement counts for the node's name: what kills one machine after another is not the machine.
"""

from __future__ import annotations

from slurm_resilience.config import Config
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, REPLACE


def escalated(snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis) -> NodeDiagnosis:
    """Return a diagnosis with the action that this fault calls for by now."""
    if diagnosis.action != REBOOT or diagnosis.kind != "sick":
        return diagnosis
    agent = snapshot.agents.get(diagnosis.node)
    machine = agent.instance if agent is not None else ""
    reboots = sum(
        repair.node == diagnosis.node
        and repair.action == REBOOT
        and repair.instance in ("", machine)
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
    """Return why a node is not replaced once more, but left to a person; empty: it may be."""
    if incident.kind == "requested" or incident.action != REPLACE:
        return ""
    earlier = sum(
        repair.node == incident.node and repair.action == REPLACE and repair.incident != incident.id
        for repair in snapshot.memory.repairs
    )
    if earlier < config.recovery.max_replacements:
        return ""
    return f"replaced {_times(earlier)} within {_window(config)} already, a person must look"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _window(config: Config) -> str:
    hours = config.recovery.recurrence_window / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} h"
