"""Choose the address of this machine that the other peers can reach."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Mapping

log = logging.getLogger("sres.mesh")

SRUN_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
"""Slurm's variable for the address of the machine that srun was called on: every node of the step
has a way to it."""
STEP_NODES = "SLURM_STEP_NUM_NODES"
FAR_AWAY = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has (RFC 5737, RFC 3849): the default route leads there. Debian gives
the host's own name 127.0.1.1, so that it says nothing of the way to others."""


def own_address(environment: Mapping[str, str], on_one_machine: bool) -> str:
    """Return the address to listen on: SRES_ADDRESS; loopback where all peers are on one machine;
    else the one of the route to MASTER_ADDR, to srun, of the host name, or of the default route."""
    given = environment.get("SRES_ADDRESS")
    if given:
        return given
    if on_one_machine:
        return "127.0.0.1"
    name = socket.gethostname()
    targets = environment.get("MASTER_ADDR"), environment.get(SRUN_ADDRESS), name
    has_others = environment.get(STEP_NODES) != "1"
    for target in (*targets, *(FAR_AWAY if has_others else ())):
        found = _route_to(target) if target else ""
        if found and found != "::1" and not found.startswith("127."):
            return found
    if has_others:
        _warn(name)
    return "127.0.0.1"


def _warn(name: str) -> None:
    log.warning(
        "ranks of other nodes cannot reach this one: the name of its machine (%s) leads to no "
        "address but loopback. Set MASTER_ADDR to the first node, or SRES_ADDRESS on each",
        name,
    )


def _route_to(target: str) -> str:
    """Return this machine's own address on the way to another; empty: there is no way."""
    for family in (socket.AF_INET, socket.AF_INET6):
        # No packet is sent: the kernel only looks up the route.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return ""
