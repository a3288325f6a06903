"""One probe: what counts as the node's silence, and what is this machine's own trouble."""

from __future__ import annotations

import errno
import socket

import pytest

from slurm_resilience.controller.probe import probe


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TimeoutError(), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route to host"), "silent"),
        (socket.gaierror(socket.EAI_NONAME, "unknown name"), "silent"),
        (ConnectionRefusedError(), "refused"),
        (OSError(errno.EMFILE, "too many open files"), None),
        (OSError(errno.ENETUNREACH, "network is unreachable"), None),
        (socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution"), None),
    ],
)
def test_what_an_error_says(
    error: OSError, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert probe("n1", 6818, 1.0) == says
