"""Host names to addresses, without waiting for a name server.

The mesh's one thread must go on beating while names cannot be resolved, or the others take it for
hung.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from slurm_resilience.clock import SYSTEM_CLOCK

FRESH_SECONDS = 10.0
"""Seconds after which a name is asked for again; until there is an answer, the old one is used."""
FAILED_SECONDS = 1.0
"""The same for a name without an answer."""

_Address = tuple[Any, ...]
_known: dict[str, tuple[int, _Address, float]] = {}
"""By name: family, address with port 0, when it was found (monotonic)."""
_failed: dict[str, tuple[str, float]] = {}
"""By name: why it was not found, and when."""
_asked: set[str] = set()
_lock = threading.Lock()


class NotYet(OSError):
    """The name is being looked up; ask again in a moment."""


def address(host: str, port: int) -> tuple[int, _Address]:
    """Family and address to connect to.

    Raises:
        NotYet: there is no answer yet.
        OSError: it was not found.
    """
    with contextlib.suppress(OSError):
        numeric = socket.AI_NUMERICHOST
        # As bytes: for letters Python imports its tables of international names first, 5 ms.
        name = host.encode() if host.isascii() else host
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=numeric)[0]
        return found[0], found[4]
    now = SYSTEM_CLOCK.monotonic()
    with _lock:
        known, failed = _known.get(host), _failed.get(host)
        failing = failed is not None and now - failed[1] < FAILED_SECONDS
        fresh = known is not None and now - known[2] < FRESH_SECONDS
        if not fresh and not failing and host not in _asked:
            asks = threading.Thread(target=_ask, args=(host,), name="sres-name", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: it is asked for again
                asks.start()
                _asked.add(host)
    if known is not None:
        family, (where, _, *rest), _ = known
        return family, (where, port, *rest)
    if failed is not None and failing:
        raise OSError(failed[0])
    raise NotYet(f"{host} is being looked up")


def _ask(host: str) -> None:
    try:
        family, _, _, _, found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with _lock:
            _known[host] = (family, found, SYSTEM_CLOCK.monotonic())
    except OSError as error:
        with _lock:
            _failed[host] = (f"{host}: {error.strerror}", SYSTEM_CLOCK.monotonic())
    finally:
        with _lock:
            _asked.discard(host)
