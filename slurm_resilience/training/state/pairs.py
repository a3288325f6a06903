"""Who keeps whose in-memory copy. Pure."""

from __future__ import annotations

from collections import Counter

from slurm_resilience.mesh.model import View


def partners(view: View) -> tuple[int, ...]:
    """The rank that keeps each rank's copy: on another node, and in another domain, if possible.

    The ranks are laid in a circle, grouped by domain and node, and each takes the one that is as
    many places ahead as the largest group is wide. That place is always outside its own group, as
    long as no group holds more than half of the ranks.

    Args:
        view: the generation.

    Returns:
        For each rank its partner's rank: a permutation, without fixed points if there are two or
        more members.
    """
    peers = [member.peer for member in view.members]
    size = len(peers)
    circle = sorted(range(size), key=lambda r: (peers[r].domain, peers[r].node, r))
    shift = size // 2
    domains = Counter(peer.domain for peer in peers)
    # A node of unknown domain counts with all others of unknown domain; its name still separates.
    nodes = Counter((peer.domain, peer.node) for peer in peers)
    for groups in (nodes, domains):
        if size and 2 * max(groups.values()) <= size:
            shift = max(groups.values())
    found = [0] * size
    for place, rank in enumerate(circle):
        found[rank] = circle[(place + shift) % size]
    return tuple(found)
