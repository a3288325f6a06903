"""Tell which nodes a round may pass over. Pure.

A node is calm while no rule of `diagnose` and `decide` has anything to say of it. That rests on
what seldom changes: Slurm's listing of it, the facts of its sresd, what the journal knows of it. So
it is found once for each change, and a round only compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurm_resilience.controller.calm.agent_views import AgentFacts, AgentPresence, AgentViews
from slurm_resilience.controller.calm.notable import PartlyCalm
from slurm_resilience.controller.decide.hints import has_leaked_gres
from slurm_resilience.controller.decide.labelling import has_our_labels
from slurm_resilience.controller.diagnose import is_plain
from slurm_resilience.controller.journal.records import KnownAgent
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Node


class CalmNodes:
    """Finds the calm nodes of one snapshot after the other."""

    def __init__(self) -> None:
        self._tables: tuple[Mapping[str, object], ...] = ({}, {}, {})
        """All that calm rested on at the last round, by node."""
        self._stirred: set[str] = set()
        """The nodes that are not calm, were they to beat."""

    def set_apart(self, snapshot: ClusterSnapshot, silent_after: float) -> ClusterSnapshot:
        """Return the snapshot with its notable nodes set apart from the calm ones.

        Args:
            snapshot: one observation.
            silent_after: `detect.silent_after`.
        """
        agents = snapshot.agents
        if not isinstance(agents, AgentViews):
            return snapshot
        nodes, facts, known = snapshot.nodes, agents.facts, snapshot.heard.known_agents
        tables = (nodes, facts, known)
        for name in _changed(self._tables, tables):
            self._stirred.discard(name)
            has_spoken = name in facts and name in known
            # What Slurm does not list is no node of this round.
            if name in nodes and not (
                has_spoken and is_calm(nodes[name], facts[name], known[name])
            ):
                self._stirred.add(name)
        self._tables = tables
        latest = agents.moment - silent_after
        silent = {name for name, at in agents.heard_at.items() if at < latest}
        apart = {*self._stirred, *silent, *_remembered(snapshot)}
        notable = {name: node for name, node in nodes.items() if name in apart}
        return msgspec.structs.replace(snapshot, nodes=PartlyCalm(nodes, notable))


def _changed(
    before: Iterable[Mapping[str, object]], now: Iterable[Mapping[str, object]]
) -> set[str]:
    """Return the names with another object in one of the tables than before: of what has not
    changed, it is the very same one."""
    changed = set[str]()
    for last, table in zip(before, now, strict=True):
        changed.update([name for name, value in table.items() if last.get(name) is not value])
        changed.update(last.keys() - table.keys())
    return changed


def is_calm(node: Node, facts: AgentFacts, known: KnownAgent) -> bool:
    """Tell whether a node is calm while its sresd beats.

    Args:
        node: as Slurm lists it.
        facts: those of its sresd.
        known: its sresd as the journal knows it.
    """
    return (
        is_plain(node)
        and not (node.reason or node.stale_reason)
        and not has_our_labels(node)
        and not has_leaked_gres(node)
        and facts.presence is AgentPresence.CONNECTED
        and not facts.findings
        and known == KnownAgent(node.name, facts.boot_id, facts.instance, facts.drivers)
    )


def _remembered(snapshot: ClusterSnapshot) -> Mapping[str, object]:
    """Return the nodes of which the journal knows more than that they are there."""
    memory = snapshot.memory
    names = (*snapshot.incidents, *snapshot.at_rest, *memory.kept, *memory.missing)
    return dict.fromkeys(names)
