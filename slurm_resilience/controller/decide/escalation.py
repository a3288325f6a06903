"""Decide, for a fault that comes again: reset, reboot, replace, then leave it to a person. Pure.

The repairs of all incidents count, as far as the journal and `recovery.recurrence_window` reach. A
reboot counts for the machine that was booted: its successor under the same name begins anew. A
replacement counts for the node's name: what kills one machine after another is not the machine. And
all repairs count for the machine, which may come back from a repair under another node's name: one
that fails again and again is a lemon.
"""

from __future__ import annotations

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal.records import Incident, Repair
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, REPLACE, RESET

SPEAKS_SECONDS = 5.0
"""A node that was heard later than this ago may be the same machine under its name of before."""


def escalated(snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis) -> NodeDiagnosis:
    """Return a diagnosis with the action that this fault calls for by now."""
    if diagnosis.action == RESET and diagnosis.kind == "sick":
        diagnosis = _after_resets(snapshot, config, diagnosis)
    if diagnosis.action != REBOOT or diagnosis.kind != "sick":
        return diagnosis
    machine = _own(snapshot, diagnosis.node, _instance_now(snapshot, diagnosis.node))
    reboots = _count(snapshot, REBOOT, diagnosis.node, machine)
    if reboots < config.recovery.max_reboots:
        return diagnosis
    text = diagnosis.reason
    if reboots:
        text += f"; rebooted {_times(reboots)} already within {_window(config)}"
    return msgspec.structs.replace(diagnosis, reason=text, action=REPLACE)


def _after_resets(
    snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis
) -> NodeDiagnosis:
    """Return a diagnosis that asks for a reboot, where its GPUs were reset often enough."""
    machine = _own(snapshot, diagnosis.node, _instance_now(snapshot, diagnosis.node))
    resets = _count(snapshot, RESET, diagnosis.node, machine)
    if resets < config.recovery.max_resets:
        return diagnosis
    text = f"{diagnosis.reason}; reset {_times(resets)} already within {_window(config)}"
    return msgspec.structs.replace(diagnosis, reason=text, action=REBOOT)


def after_failure(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, *, is_sick: bool
) -> str:
    """Return the action for a fault that a repair did not mend, where the same one would not help
    either; empty: the same once more.

    Args:
        snapshot: the observation, with the repairs of this incident too.
        config: limits (`[recovery]`).
        incident: of the fault.
        is_sick: the node came back with a fault; else the repair itself failed.
    """
    if incident.kind == "requested" or not (is_sick or incident.action == RESET):
        return ""
    machine = _machine_of(snapshot, incident)
    is_used_up = _count(snapshot, REBOOT, incident.node, machine) >= config.recovery.max_reboots
    if incident.action == RESET:
        return REPLACE if is_used_up else REBOOT
    is_next = incident.action == REBOOT and is_used_up and snapshot.site.can_replace
    return REPLACE if is_next else ""


def _count(snapshot: ClusterSnapshot, action: str, node: str, machine: str) -> int:
    return sum(
        repair.action == action and _is_of(repair, node, machine)
        for repair in snapshot.memory.repairs
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
    """Tell whether a repair was of this machine; of the node, where the one or the other machine
    is not known."""
    if repair.instance and machine:
        return repair.instance == machine
    return repair.node == node


def _machine_of(snapshot: ClusterSnapshot, incident: Incident) -> str:
    known = _instance_now(snapshot, incident.node) or incident.before.instance
    return _own(snapshot, incident.node, known)


def _instance_now(snapshot: ClusterSnapshot, node: str) -> str:
    agent = snapshot.agents.get(node)
    return agent.instance if agent is not None else ""


def _own(snapshot: ClusterSnapshot, node: str, machine: str) -> str:
    """Return a machine's identity; empty where another node shows the same at this moment: it is
    then a board maker's placeholder, or a copied image's, and no machine's own."""
    is_shared = any(
        agent.instance == machine and agent.is_connected and agent.silence < SPEAKS_SECONDS
        for name, agent in snapshot.agents.items()
        if name != node
    )
    return "" if is_shared else machine


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _window(config: Config) -> str:
    hours = config.recovery.recurrence_window / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} h"
