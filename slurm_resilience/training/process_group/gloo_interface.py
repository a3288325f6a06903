"""Choose the interface that gloo's groups listen on: the one with the mesh's address."""

from __future__ import annotations

import contextlib
import os
import socket

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""torch reads it whenever a group is made."""
_SPOKEN = (socket.AF_INET, socket.AF_INET6)


def listen_beside_mesh(host: str) -> None:
    """Have gloo listen where the mesh does.

    By itself it takes the address of this machine's name. That is 127.0.1.1 wherever Debian's own
    `/etc/hosts` is used, and ranks of other nodes cannot reach it. What the program's environment
    says counts.

    Args:
        host: of this process in the mesh.
    """
    if os.environ.get(GLOO_INTERFACE):
        return
    with contextlib.suppress(OSError):
        known = {found[4][0] for found in socket.getaddrinfo(host, None)}
        for name, addresses in psutil.net_if_addrs().items():
            # gloo takes the first of them: the address of a machine may be a later one of `lo`.
            spoken = [one.address for one in addresses if one.family in _SPOKEN]
            if spoken and spoken[0] in known:
                os.environ[GLOO_INTERFACE] = name
