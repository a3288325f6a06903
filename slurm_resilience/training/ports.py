"""Are there ports enough? Process groups need some of the kernel's ephemeral ones. Without torch.

Every rank listens once for the mesh and once for each process group, on a port that the kernel
chooses and that nobody else has then. The connections between the ranks share ports, because each
goes to another address: Linux gives them the even ones of the range (by its first port) while it
can, and the listeners the others. So the listeners must fit in half of the range.
(Seen on Linux 6.18: 30 connections and 12 listeners fit in 32 ports, and not in 16.)
"""

from __future__ import annotations

from pathlib import Path

FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")

GROUPS = 3
"""Process groups of a world: its own, the checkpoint's, the partner copies'."""
WORLDS = 2
"""After a fault the groups of the world before are still there for a few seconds."""


def port_range() -> tuple[int, int]:
    """The first and the last ephemeral port of this machine; (0, 0): it does not say."""
    try:
        first, last = FILE.read_text(encoding="ascii").split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 0, 0


def needed(local_ranks: int, groups: int = GROUPS) -> int:
    """Ephemeral ports that a machine needs.

    Args:
        local_ranks: ranks on this machine.
        groups: process groups of one world.
    """
    listeners = local_ranks * (1 + WORLDS * groups)
    return 2 * listeners


def warning(local_ranks: int, ports: tuple[int, int], groups: int = GROUPS) -> str:
    """One line if this machine's range is too narrow; empty if it is not, or is not known. Pure.

    Args:
        local_ranks: ranks on this machine.
        ports: first and last ephemeral port, as `port_range` gives them.
        groups: process groups of one world; the program's own (`Session.new_group`) count.
    """
    first, last = ports
    if last <= 0:
        return ""
    have, want = max(0, last - first + 1), needed(local_ranks, groups)
    if have >= want:
        return ""
    return (
        f"only {have} ephemeral ports ({first}-{last}), {local_ranks} ranks here may need {want}: "
        'widen them (sysctl -w net.ipv4.ip_local_port_range="30000 65535")'
    )
