"""Open a socket for the datagrams that nodes of a step send to the supervisor."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

PORT_TRIES = 20


def open_facing(
    node_address: str,
    ports: Sequence[int],
    buffer_bytes: int,
    receive: Callable[[socket.socket], None],
    name: str,
) -> socket.socket:
    """Return a socket on that address of this machine which faces a node, and receive from it.

    Args:
        node_address: best of another machine than this one.
        ports: those that the site allows for srun (SrunPortRange); empty: any.
        buffer_bytes: for what comes in one moment; the kernel may give less.
        receive: called in a thread of its own, for ever.
        name: of that thread.

    Raises:
        OSError: the address is not known, no port is free, or no thread can be started.
    """
    # As bytes: for text Python loads its tables of foreign scripts, and the step waits.
    found = socket.getaddrinfo(node_address.encode(), 1, type=socket.SOCK_DGRAM)
    family, *_, address = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: this asks which of our addresses faces the node.
        probe.connect(address)
        own_address = probe.getsockname()[0]
    listening = socket.socket(family, socket.SOCK_DGRAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        _bind(listening, own_address, ports)
    except OSError:
        listening.close()
        raise
    try:
        threading.Thread(target=receive, args=(listening,), name=name, daemon=True).start()
    except RuntimeError as error:
        listening.close()
        raise OSError(str(error)) from None
    return listening


def _bind(listening: socket.socket, own_address: str, ports: Sequence[int]) -> None:
    """Bind to a port that is free, and allowed.

    Raises:
        OSError: none is.
    """
    if not ports:
        listening.bind((own_address, 0))
        return
    # Late: few sites limit them, and no step waits for what it does not need.
    import random

    # No secret: only that two supervisors seldom try the same port first.
    for port in random.sample(ports, min(PORT_TRIES, len(ports))):
        with contextlib.suppress(OSError):
            listening.bind((own_address, port))
            return
    raise OSError("no free port")
