"""Copies of the state in the memory of two nodes, for models whose parts exist only once.

Every few steps each rank copies its state to host memory, and sends that copy to its partner while
the next steps run. A round counts only when every rank has both its own and its partner's copy
whole; until then, and until everybody has said so, the round before is kept. A fault at any moment
leaves one round that all ranks have.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import torch

from slurm_resilience.mesh.model import View
from slurm_resilience.training.state.capture import Capture
from slurm_resilience.training.state.errors import StateError
from slurm_resilience.training.state.exchange import Exchange, PartnerCopy, Round
from slurm_resilience.training.state.tracked import Tracked


class Cost(NamedTuple):
    """What one snapshot took."""

    step: int
    bytes: int
    blocked_ms: float
    """The step waited this long."""
    behind_ms: float = 0.0
    """Until everybody had it, while steps went on; 0: not yet known."""

    def __str__(self) -> str:
        size = f"{self.bytes / 1e6:.1f} MB"
        behind = f", {self.behind_ms:.0f} ms behind" if self.behind_ms else ""
        return f"snapshot of step {self.step}: {size}, {self.blocked_ms:.1f} ms in the step{behind}"


class Partner:
    """This rank's copies, its own and the one that it keeps.

    Holds up to four parts' bytes in host memory while a round runs, and two otherwise (the buffers
    stay, to be used again).

    Args:
        every: steps between snapshots.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = max(1, every)
        self.last: Cost | None = None
        self._lock = threading.Lock()
        self._rounds: tuple[Round, ...] = ()
        """Newest first; two only until everybody has published the newest."""
        self._spare: list[torch.Tensor] = []
        self._link: Exchange | None = None

    @property
    def step(self) -> int:
        """Step of the newest whole round, for Status; -1: none."""
        with self._lock:
            return self._rounds[0].own.step if self._rounds else -1

    @property
    def keeps(self) -> tuple[int, ...]:
        """Seats whose copy of that step is here, for Status."""
        with self._lock:
            kept = self._rounds[0].kept if self._rounds else None
            return (kept.seat,) if kept else ()

    def open(self, view: View, rank: int, process_group: Any) -> None:
        """Take part in a generation.

        Args:
            view: the generation.
            rank: of this process.
            process_group: of all members in rank order, CPU (gloo), used by nobody else: the copies
                travel on it while the training uses its own.
        """
        self.close()
        self._link = Exchange(self, view, rank, process_group)

    def close(self, timeout: float = 5.0) -> None:
        """The generation is over: an unfinished round is dropped. Close the group's sockets before,
        or a round that waits for a lost peer lasts until `timeout` seconds."""
        link, self._link = self._link, None
        if link:
            link.close(timeout)

    def drop(self) -> None:
        """Forget all copies (they do not fit any more: another layout)."""
        with self._lock:
            self._rounds = ()

    def due(self, step: int) -> bool:
        """Whether a snapshot of this committed step is wanted."""
        return step % self.every == 0

    def snapshot(self, step: int, tracked: Tracked) -> Cost | None:
        """Copy the state of a committed step; every rank calls it at the same steps.

        Waits only for the copy to host memory. If the round before still runs at any rank, this one
        is left out at all.

        Args:
            step: committed steps in the state.
            tracked: the state; not changed.

        Returns:
            Its cost so far; None: none was taken.
        """
        link = self._link
        if link is None or link.error:
            return None
        if link.busy:
            link.post(step, None)
            return None
        begin = time.monotonic()
        capture = tracked.capture()
        data = self.buffer(capture.skeleton.total)
        for view, place in zip(
            capture.views, torch.split(data, list(capture.skeleton.sizes)), strict=True
        ):
            place.copy_(view)
        took = (time.monotonic() - begin) * 1000
        own = PartnerCopy(step, link.seat, link.part, capture.skeleton, data)
        self.last = cost = Cost(step, data.numel(), took)
        link.post(step, own)
        return cost

    def wait(self, timeout: float) -> bool:
        """Wait until no round runs. False: one still does after `timeout` seconds."""
        link = self._link
        return link is None or link.idle(timeout)

    @property
    def error(self) -> str:
        """Why copies stopped in this generation; empty: they did not."""
        return self._link.error if self._link else ""

    def restore_own(self, tracked: Tracked, step: int) -> None:
        """Go back to this rank's own copy, random states included.

        Raises:
            StateError: there is no such copy, or it does not fit.
        """
        own = self._round(step).own
        views = tracked.prepare(own.skeleton)
        for view, there in zip(views, own.capture().views, strict=True):
            view.copy_(there)
        tracked.finish(own.skeleton, rng_too=True)
        with self._lock:
            # A later round belongs to steps that will be done anew.
            self._rounds = tuple(one for one in self._rounds if one.own.step <= step)

    def give(self, seat: int, step: int, part: int) -> Capture:
        """The copy that a lost seat needs: its own, kept here, or that of the same part.

        Args:
            seat: whose.
            step: of which step.
            part: which part of a replica that seat holds now.

        Raises:
            StateError: it is not here. Drop the copies and plan again.
        """
        found = self._round(step)
        if found.kept and found.kept.seat == seat and found.kept.part == part:
            return found.kept.capture()
        if found.own.part == part:
            return found.own.capture()
        raise StateError(f"no copy of part {part} for seat {seat} at step {step} is kept here")

    def _round(self, step: int) -> Round:
        with self._lock:
            for one in self._rounds:
                if one.own.step == step:
                    return one
            have = [one.own.step for one in self._rounds]
        raise StateError(f"no copy in memory of step {step} (there are {have})")

    def buffer(self, size: int) -> torch.Tensor:
        """Host memory for a copy, used again where one of that size is free."""
        with self._lock:
            for number, one in enumerate(self._spare):
                if one.numel() == size:
                    return self._spare.pop(number)
            # Two sizes are in use, the own part's and the kept one's; older ones are outdated.
            del self._spare[:-2]
        # Pinned memory lets a GPU write at full speed.
        pin = torch.cuda.is_available()
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)

    def publish(self, one: Round, seconds: float) -> None:
        """A round that everybody has whole; called by the exchange."""
        with self._lock:
            self._rounds = (one, *self._rounds[:1])
        if self.last and self.last.step == one.own.step:
            self.last = self.last._replace(behind_ms=seconds * 1000)

    def settle(self, unused: PartnerCopy | None = None) -> None:
        """Keep the newest round only, and the others' buffers for later; called by the exchange."""
        with self._lock:
            old = [copy for one in self._rounds[1:] for copy in one if copy]
            self._rounds = self._rounds[:1]
            self._spare += [copy.data for copy in (*old, unused) if copy]
