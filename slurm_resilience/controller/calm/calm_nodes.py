"""Tell which nodes a round may pass over. Pure.

A node is calm while no rule of `diagnose` and `decide` has anything to say of it. That rests on
what seldom changes: Slurm's listing of it, the facts of its sresd, what the journal knows of it. So
it is found once for each change, and a round only compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from slurm_resilience.controller.calm.agent_views import AgentFacts, AgentPresence, AgentViews
from slurm_resilience.controller.calm.notable import PartlyCalm
from slurm_resilience.controller.decide.hints import has_leaked_gres
from slurm_resilience.controller.decide.labelling import has_our_labels
from slurm_resilience.controller.diagnose import is_plain
from slurm_resilience.controller.journal.records import KnownAgent
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Node


class _Basis(NamedTuple):
    """All that a node's calm rested on."""

    node: Node
    facts: AgentFacts
    known: KnownAgent
    is_calm: bool


class CalmNodes:
    """Finds the calm nodes of one snapshot after the other."""

    def __init__(self) -> None:
        self._bases: dict[str, _Basis] = {}

    def set_apart(self, snapshot: ClusterSnapshot, silent_after: float) -> ClusterSnapshot:
        """Return the snapshot with its notable nodes set apart from the calm ones.

        Args:
            snapshot: one observation.
            silent_after: `detect.silent_after`.
        """
        agents = snapshot.agents
        if not isinstance(agents, AgentViews):
            return snapshot
        nodes, bases = snapshot.nodes, self._bases
        known, facts, heard_at = snapshot.heard.known_agents, agents.facts, agents.heard_at
        remembered = _remembered(snapshot)
        notable: dict[str, Node] = {}
        for name, node in nodes.items():
            basis, of_agent, of_journal = bases.get(name), facts.get(name), known.get(name)
            if of_agent is None or of_journal is None:
                notable[name] = node
                continue
            if basis is None or not (
                # The very same objects: nothing of them has changed.
                basis.node is node and basis.facts is of_agent and basis.known is of_journal
            ):
                basis = _Basis(node, of_agent, of_journal, is_calm(node, of_agent, of_journal))
                bases[name] = basis
            is_silent = agents.moment - heard_at[name] > silent_after
            if is_silent or not basis.is_calm or name in remembered:
                notable[name] = node
        if len(bases) > len(nodes):
            self._bases = {name: bases[name] for name in nodes if name in bases}
        return msgspec.structs.replace(snapshot, nodes=PartlyCalm(nodes, notable))


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
