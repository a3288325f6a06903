"""The rounds in which ranks exchange their copies, on a thread beside the steps.

A round: all say whether they have a copy of this step (if one has none, the round is left out);
each sends its own and receives the one to keep; all wait for all, and publish; all wait for all
again, and only then let go of the round before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from slurm_resilience.mesh.model import View
from slurm_resilience.training.state.capture import Capture
from slurm_resilience.training.state.chunks import cut
from slurm_resilience.training.state.descriptor import StateDescriptor, pack, unpack
from slurm_resilience.training.state.pairs import partners

_BUCKET_BYTES = 32 << 20
_IN_FLIGHT = 16
"""Messages under way to one rank, each of up to 32 MB."""
_HEADER_WORDS = 5
_HEADER_TAG, _SKELETON_TAG, _FIRST_TAG = 0, 1, 2


class PartnerCopy(NamedTuple):
    """One rank's state at one step, in host memory."""

    step: int
    seat: int
    part: int
    skeleton: StateDescriptor
    data: torch.Tensor
    """uint8 of shape (bytes,): all tensors, one after another."""

    def capture(self) -> Capture:
        """As something that can be sent."""
        return Capture(self.skeleton, torch.split(self.data, list(self.skeleton.sizes)))


class Round(NamedTuple):
    """What a rank has of one step."""

    own: PartnerCopy
    kept: PartnerCopy | None
    """The copy of the rank whose partner this one is; None in a world of one."""


class CopyShelf(Protocol):
    """Where copies are kept."""

    def buffer(self, size: int) -> torch.Tensor:
        """Host memory of `size` bytes."""

    def publish(self, one: Round, seconds: float) -> None:
        """Everybody has this round whole; it took so long."""

    def settle(self, unused: PartnerCopy | None = None) -> None:
        """Everybody has published the newest round: older ones may go, and this copy too."""


class Exchange:
    """The thread that exchanges copies during one generation."""

    def __init__(self, shelf: CopyShelf, view: View, rank: int, group: Any) -> None:
        self._shelf, self._group = shelf, group
        self.seat, self.part = view.members[rank].peer.seat, view.position(rank)
        to = partners(view)
        self._to, self._from = to[rank], to.index(rank)
        self._alone = view.size == 1
        self.error = ""
        self._posted: queue.SimpleQueue[tuple[int, PartnerCopy | None] | None] = queue.SimpleQueue()
        self._open = 0
        self._quiet = threading.Condition()
        name = f"copies-{view.generation}"
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._open > 0

    def post(self, step: int, own: PartnerCopy | None) -> None:
        """Begin a round; without a copy: tell the others to leave it out."""
        with self._quiet:
            self._open += 1
        self._posted.put((step, own))

    def idle(self, timeout: float) -> bool:
        with self._quiet:
            return self._quiet.wait_for(lambda: not self._open or bool(self.error), timeout)

    def close(self, timeout: float) -> None:
        self._posted.put(None)
        self._thread.join(timeout)

    def _loop(self) -> None:
        while (posted := self._posted.get()) is not None:
            try:
                self._round(posted[1])
            except Exception as error:
                # The group's sockets were cut, or a peer died: the generation ends anyway. What
                # the round held is dropped with it; its buffers may still be written to.
                with self._quiet:
                    self.error = str(error).strip() or type(error).__name__
                    self._quiet.notify_all()
                return
            with self._quiet:
                self._open -= 1
                self._quiet.notify_all()

    def _round(self, own: PartnerCopy | None) -> None:
        begin = time.monotonic()
        if not self._all_have(own):
            self._shelf.settle(own)
            return
        assert own is not None
        kept = None if self._alone else self._exchange(own)
        self._together()
        self._shelf.publish(Round(own, kept), time.monotonic() - begin)
        self._together()
        self._shelf.settle()

    def _all_have(self, own: PartnerCopy | None) -> bool:
        flag = torch.tensor([0 if own is None else 1], dtype=torch.int64)
        if not self._alone:
            self._group.allreduce([flag], torch.distributed.ReduceOp.MIN).wait()
        return bool(flag.item())

    def _together(self) -> None:
        if not self._alone:
            self._group.barrier().wait()

    def _exchange(self, own: PartnerCopy) -> PartnerCopy:
        """Send the own copy, and receive the one to keep."""
        skeleton = pack(own.skeleton)
        words = [own.step, own.seat, own.part, len(skeleton), own.data.numel()]
        header = torch.zeros(_HEADER_WORDS, dtype=torch.int64)
        self._swap([torch.tensor(words)], [header], _HEADER_TAG)
        step, seat, part, length, size = header.tolist()
        described = torch.empty(length, dtype=torch.uint8)
        mine = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
        self._swap([mine], [described], _SKELETON_TAG)
        data = self._shelf.buffer(size)
        self._swap(_slices(own.data), _slices(data), _FIRST_TAG)
        return PartnerCopy(step, seat, part, unpack(described.numpy().tobytes()), data)

    def _swap(self, out: list[torch.Tensor], into: list[torch.Tensor], tag: int) -> None:
        """Send and receive at the same time, a few messages in flight each way."""
        flying: deque[Any] = deque()
        for number in range(max(len(out), len(into))):
            if number < len(into):
                flying.append(self._group.recv([into[number]], self._from, tag + number))
            if number < len(out):
                flying.append(self._group.send([out[number]], self._to, tag + number))
            while len(flying) >= _IN_FLIGHT:
                flying.popleft().wait()
        while flying:
            flying.popleft().wait()


def _slices(data: torch.Tensor) -> list[torch.Tensor]:
    chunks = cut([data.numel()], _BUCKET_BYTES)
    return [data[chunk.pieces[0].start : chunk.pieces[0].stop] for chunk in chunks]
