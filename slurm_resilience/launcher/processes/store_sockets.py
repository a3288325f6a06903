"""Tell from the kernel's tables whether a process is in a process group of torch's.

With torch's usual rendezvous (``env://``) every rank keeps a connection to MASTER_PORT, or listens
there, for as long as its process group lives. A program that never made a group has none.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def sockets_on(table: str, port: int) -> set[int]:
    """Return the inodes of the sockets with this port at either end. Pure.

    Args:
        table: the text of ``/proc/net/tcp`` or ``tcp6``.
        port: MASTER_PORT.
    """
    found = set()
    for line in table.splitlines()[1:]:
        words = line.split()
        ends = {int(end.rpartition(":")[2], 16) for end in words[1:3]}
        if port in ends:
            found.add(int(words[9]))
    return found


def is_on_port(pid: int, port: int) -> bool:
    """Tell whether a process has a socket with this port at either end.

    Args:
        pid: of a process of this user; one that has ended has none.
        port: MASTER_PORT.
    """
    place = Path(f"/proc/{pid}")
    own, tables = set(), []
    with suppress(OSError):  # it has ended
        for descriptor in (place / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                own.add(str(descriptor.readlink()))
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # a kernel without IPv6
            tables.append((place / "net" / name).read_text(encoding="ascii"))
    return any(f"socket:[{inode}]" in own for table in tables for inode in sockets_on(table, port))
