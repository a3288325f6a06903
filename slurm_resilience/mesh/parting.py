"""Close connections so that what was said last on them arrives.

A socket that is closed while the other side still says something is reset. Whoever then finds that
it can send nothing any more ends the connection, with words unread that had arrived before: one
rank had ended the training for all, say, and another one went on alone.

So this side says that nothing more comes, and takes what the other one says until that one, which
has read all, has closed too.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterable

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import WireError
from slurm_resilience.mesh.connection import PeerConnection

PART_SECONDS = 1.0
"""So long the others have for it at most: one may be stopped, or its cable pulled."""
_READS, _WRITES = select.POLLIN, select.POLLIN | select.POLLOUT


def part(connections: Iterable[PeerConnection], seconds: float = PART_SECONDS) -> None:
    """Close connections that nothing else uses any more.

    Args:
        connections: those in the middle of their handshake are closed at once.
        seconds: that it may take.
    """
    left = {one.fileno(): one for one in connections if one.proven and one.fileno() >= 0}
    for one in connections:
        if one.fileno() not in left:
            one.close()
    looks = select.poll()
    for descriptor, one in list(left.items()):
        one.finish()
        looks.register(descriptor, _WRITES if one.wants_to_write else _READS)
    until = SYSTEM_CLOCK.monotonic() + seconds
    while left and (rest := until - SYSTEM_CLOCK.monotonic()) > 0:
        for descriptor, events in looks.poll(1000 * rest):
            if not _goes_on(left[descriptor], events):
                looks.unregister(descriptor)
                left.pop(descriptor).close()
            elif not left[descriptor].wants_to_write:
                looks.modify(descriptor, _READS)
    for one in left.values():
        one.close()


def _goes_on(connection: PeerConnection, events: int) -> bool:
    """Send what waits, drop what comes; tell whether the other side has not closed yet."""
    with contextlib.suppress(WireError):
        if connection.wants_to_write and events & select.POLLOUT:
            connection.flush()
        if events & ~select.POLLOUT:
            connection.take()
            for _ in connection.received():
                pass
        return True
    return False
