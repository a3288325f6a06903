"""Speak to a lab's keeper: one JSON line there, one back. Standard library only."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from slurm_resilience import errors
from slurm_resilience.errors import LabError, SresError


def ask(path: str, order: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """Send an order and wait for what came of it.

    Raises:
        LabError: the keeper is not there, or any error that it answered with.
    """
    reply, handles = _exchange(path, order, timeout)
    for handle in handles:
        os.close(handle)
    return reply


def handle(path: str, place: str) -> int:
    """Open a pidfd of a place's pid 1."""
    _, handles = _exchange(path, {"do": "enter", "nodes": [place]}, 10)
    if len(handles) != 1:
        raise LabError("the lab's keeper sent no handle; it is another version than this program")
    return handles[0]


def _exchange(
    path: str, order: dict[str, Any], timeout: float | None
) -> tuple[dict[str, Any], list[int]]:
    data, handles = b"", []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(timeout)
        try:
            channel.connect(path)
            channel.sendall(json.dumps(order).encode() + b"\n")
            while not data.endswith(b"\n"):
                part, got, _, _ = socket.recv_fds(channel, 65536, 4)
                handles += got
                if not part:
                    raise LabError("the lab's keeper ended in the middle of the order")
                data += part
        except TimeoutError:
            raise LabError(f"the lab's keeper did not answer in {timeout} s") from None
        except OSError as error:
            raise LabError(f"the lab is not up ({error.strerror}); `sres lab up` first") from None
    reply = json.loads(data)
    if "error" in reply:
        kind = getattr(errors, reply.get("kind", ""), LabError)
        raise kind(reply["error"]) if issubclass(kind, SresError) else LabError(reply["error"])
    return reply, handles
