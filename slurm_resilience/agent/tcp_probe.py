"""Connect to many addresses at once, with one time limit for all, to see which answer."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple

import psutil

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError


class ProbeAddress(NamedTuple):
    """A resolved TCP address: it can be tried when no name server can be reached any more."""

    family: int
    sockaddr: tuple[Any, ...]

    @property
    def ip(self) -> str:
        return str(self.sockaddr[0])


def split(text: str) -> tuple[str, int]:
    """``address:port`` (an IPv6 address may stand in brackets).

    Raises:
        UsageError: no port.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"'{text}' is not address:port")
    return host.strip("[]"), int(port)


def resolve(host: str, port: int) -> tuple[ProbeAddress, ...]:
    """Return the addresses of a name; none when it cannot be looked up. May block on name
    servers."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(ProbeAddress(int(family), sockaddr) for family, _, _, _, sockaddr in answers)


def own_addresses() -> frozenset[str]:
    """Return this machine's addresses: an answer from one of them proves nothing about the
    cable."""
    interfaces = psutil.net_if_addrs().values()
    return frozenset(one.address.split("%")[0] for each in interfaces for one in each)


def reach(addresses: Iterable[ProbeAddress], timeout: float) -> frozenset[ProbeAddress]:
    """Return the addresses that answered. A refusal is an answer: a machine is there.

    Args:
        addresses: what to connect to; each connection is closed at once.
        timeout: seconds for all of them together.
    """
    answered: set[ProbeAddress] = set()
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for address in set(addresses):
            try:
                sock = stack.enter_context(socket.socket(address.family, socket.SOCK_STREAM))
                sock.setblocking(False)
                code = sock.connect_ex(address.sockaddr)
            except OSError:
                continue
            if code in (0, errno.ECONNREFUSED):
                answered.add(address)
            elif code == errno.EINPROGRESS:
                selector.register(sock, selectors.EVENT_WRITE, address)
        deadline = SYSTEM_CLOCK.monotonic() + timeout
        while selector.get_map() and (left := deadline - SYSTEM_CLOCK.monotonic()) > 0:
            for key, _ in selector.select(left):
                tried = key.fileobj
                assert isinstance(tried, socket.socket)
                selector.unregister(tried)
                if tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED):
                    answered.add(key.data)
    return frozenset(answered)
