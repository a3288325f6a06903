"""torch's usual store, whose server lives in rank 0: for when part `rootless` is off."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import View


def rooted_store(mesh: Mesh, view: View, timeout: float) -> Any:
    """Return the store of one generation.

    Args:
        mesh: tells the others the server's port.
        view: the generation.
        timeout: seconds in which rank 0 must have said it.
    """
    tcp_store: Any = vars(dist)["TCPStore"]
    rank = view.rank_of(mesh.me.id)
    host = view.members[0].peer.host
    if rank == 0:
        server: Any = tcp_store(host, 0, is_master=True, wait_for_workers=False)
        mesh.put(view.generation, "tcpstore", str(server.port).encode())
        return server
    (port,) = mesh.get(view.generation, ["tcpstore"], timeout)
    return tcp_store(host, int(port), is_master=False, wait_for_workers=False)
