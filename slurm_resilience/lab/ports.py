"""Addresses and ports of a lab, such that labs side by side never meet."""

from __future__ import annotations

import socket

from slurm_resilience.lab.conf import ConfPlan
from slurm_resilience.lab.machines.network import BACKUP_NUMBER, address
from slurm_resilience.lab.spec import LabSpec


def reserve(spec: LabSpec) -> tuple[list[socket.socket], ConfPlan]:
    """Reserve the lab's addresses and ports; return also the sockets that hold the ports for its
    life.

    In a networked lab every node has an address of its own, and Slurm's usual ports are free. Else
    all share the machine's: each port is bound here, so the kernel gives it to no other, but
    never listened on; as both sides say SO_REUSEADDR, the lab's own daemon may still bind it.
    """
    if spec.network:
        nodes = {name: (address(n), 6818) for n, name in enumerate(spec.names, start=1)}
        backup = address(BACKUP_NUMBER) if spec.backup else ""
        return [], ConfPlan(address(0), 6817, 6819, 6829, nodes, backup)
    held = [_hold() for _ in range(3 + spec.nodes)]
    first, second, third, *rest = (s.getsockname()[1] for s in held)
    nodes = {name: ("127.0.0.1", port) for name, port in zip(spec.names, rest, strict=True)}
    return held, ConfPlan("127.0.0.1", first, second, third, nodes)


def _hold() -> socket.socket:
    held = socket.socket()
    # Bound first and made shareable after: the kernel then picks a port that no process holds.
    held.bind(("", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held
