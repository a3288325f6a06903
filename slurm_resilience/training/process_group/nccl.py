"""NCCL's part of a world's process groups: it is waited for, and aborted."""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.distributed as dist

from slurm_resilience.training import compat

ABORT_SECONDS = 10.0
"""Aborting NCCL's communicators takes milliseconds. One that takes longer is hung: this process is
given up by the others."""


class NcclPart:
    """NCCL's part of one world.

    Args:
        backend: torch's name of it; without NCCL in it there is nothing to do.
        size: ranks.
    """

    def __init__(self, backend: str, size: int) -> None:
        self.is_used = "nccl" in backend
        self._size = size
        self._work_done: torch.cuda.Event | None = None
        self._aborting: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def runs_ahead(self) -> bool:
        """True where the host does not wait for other ranks: NCCL's collectives return before they
        are done."""
        if not self.is_used or self._size == 1:
            return False
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return in_use

    def settle(self) -> None:
        """Wait until the GPU has done what this process gave it.

        A group that is aborted meanwhile lets this return as well: the caller looks afterwards.

        Raises:
            RuntimeError: the GPU has faulted.
        """
        if self._work_done is None:
            # It sleeps; by default the driver would keep a core busy.
            self._work_done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._work_done.record()
        self._work_done.synchronize()

    def abort(self) -> None:
        """Begin to abort it, once, in a thread of its own. From any thread."""
        with self._lock:
            if self.is_used and self._aborting is None and dist.is_initialized():
                self._aborting = threading.Thread(target=_abort, name="sres-abort", daemon=True)
                self._aborting.start()

    def leave(self) -> None:
        """Abort it, and wait for that: what destroys the groups would wait for kernels that still
        wait for other ranks."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS)


def _abort() -> None:
    """Abort NCCL's groups; it may wait for kernels."""
    with contextlib.suppress(Exception):
        compat.abort_nccl()
