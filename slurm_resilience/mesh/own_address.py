"""Choose the address of this machine that the other peers can reach."""

from __future__ import annotations

import socket
from collections.abc import Mapping


def own_address(environment: Mapping[str, str], on_one_machine: bool) -> str:
    """Return the address to listen on: SRES_ADDRESS; loopback where all peers are on one machine;
    else the one of the route to MASTER_ADDR, or the host name's."""
    given = environment.get("SRES_ADDRESS")
    if given:
        return given
    if on_one_machine:
        return "127.0.0.1"
    master = environment.get("MASTER_ADDR", "")
    for target in (master, socket.gethostname()):
        found = _route_to(target) if target else ""
        if found and not found.startswith("127."):
            return found
    return "127.0.0.1"


def _route_to(target: str) -> str:
    try:
        # No packet is sent: the kernel only looks up the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
