"""Messages of bytes over a process group, a few in flight at a time.

Sends and receives go through the group object itself, by ranks of the group: it need not be known
to torch.distributed. Slices of tensors cost no memory while they fly, so many may; of packed
messages there are two at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from slurm_resilience.training.state.chunks import Chunk

IN_FLIGHT = {"cpu": 1024, "cuda": 16}
"""Messages under way to, or from, one rank. Gloo shakes hands before each message, in the same
connection as the data: with 16 posted at a time 4 MB messages reach 60 % of what one large message
does, with all of them posted at once 100 %. NCCL starts a kernel for each."""
PACKED_IN_FLIGHT = 2
"""Of these, messages with a buffer of their own."""


def wire_device(group: Any) -> torch.device:
    """Where a group sends from: the current GPU if it uses NCCL, else host memory."""
    if torch.cuda.is_available():
        for device in group._device_types:
            if device.type == "cuda" and group._get_backend(device).name() == "nccl":
                return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def land(group: Any, *works: Any) -> None:
    """Wait for messages, as long as the group's collectives wait.

    By itself a message over gloo has the limit that the group was formed with. That one is short,
    and whoever comes last may still have to build its model.
    """
    limit: tuple[timedelta, ...] = ()
    if wire_device(group).type == "cpu":
        limit = (group._get_backend(torch.device("cpu")).options._timeout,)
    for work in works:
        work.wait(*limit)


class Pool:
    """Buffers for packed messages, used again and again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes."""
        for number, one in enumerate(self._free):
            if one.numel() >= size:
                return self._free.pop(number)[:size]
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._free.append(buffer)


class Payload:
    """One message's bytes: a slice of a tensor's own storage, or a buffer from the pool."""

    def __init__(self, chunk: Chunk, views: Sequence[torch.Tensor], pool: Pool) -> None:
        self.chunk, self.views, self.pool = chunk, views, pool
        first = chunk.pieces[0]
        self.own = chunk.packed or views[first.tensor].device != pool.device
        if self.own:
            self.bytes = pool.take(chunk.size)
        else:
            self.bytes = views[first.tensor][first.start : first.stop]

    def fill(self) -> Payload:
        """Before sending: from the tensors."""
        if self.own:
            for inside, there in self._pairs():
                inside.copy_(there)
        return self

    def empty(self) -> None:
        """After receiving: into the tensors."""
        if self.own:
            for inside, there in self._pairs():
                there.copy_(inside)

    def free(self) -> None:
        """Nobody reads the buffer any more."""
        if self.own:
            self.pool.give(self.bytes)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found, start = [], 0
        for piece in self.chunk.pieces:
            there = self.views[piece.tensor][piece.start : piece.stop]
            found.append((self.bytes[start : start + piece.size], there))
            start += piece.size
        return found


class SendQueue:
    """Sends every message to the same ranks."""

    def __init__(self, group: Any, targets: Sequence[int], device: torch.device) -> None:
        self._group, self._targets = group, targets
        self._flying: deque[tuple[Payload, list[Any]]] = deque()
        self._packed = 0
        self._most = IN_FLIGHT[device.type]

    def put(self, payload: Payload, tag: int) -> None:
        """Begin to send; the payload is freed when all have it."""
        if not self._targets:
            payload.free()
            return
        works = [self._group.send([payload.bytes], target, tag) for target in self._targets]
        self._flying.append((payload, works))
        self._packed += payload.own

    def room(self) -> None:
        """Wait until there is room for another message."""
        if len(self._flying) >= self._most:
            # Room for many at once: one by one, each would wait for its own handshake.
            while len(self._flying) > self._most // 2:
                self._land()
        while self._packed >= PACKED_IN_FLIGHT:
            self._land()

    def drain(self) -> None:
        """Wait until everything is sent."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        payload, works = self._flying.popleft()
        land(self._group, *works)
        self._packed -= payload.own
        payload.free()


class ReceiveQueue:
    """Receives messages in order, each from its own source; the next ones are already posted."""

    def __init__(
        self,
        group: Any,
        chunks: Sequence[Chunk],
        sources: Sequence[int],
        views: Sequence[torch.Tensor],
        pool: Pool,
        first_tag: int,
    ) -> None:
        self._group, self._chunks, self._sources = group, chunks, sources
        self._views, self._pool, self._tag = views, pool, first_tag
        self._posted: deque[tuple[Payload, Any]] = deque()
        self._next = self._taken = 0
        self._most = IN_FLIGHT[pool.device.type]
        self._posted_from: Counter[int] = Counter()
        self._packed_from: Counter[int] = Counter()
        self._post()

    def take(self) -> Payload:
        """The next message, arrived; to be emptied and freed."""
        # Only now: the message before has been emptied, so its buffer can be used again. Many at
        # once, as in `Outbox.room`.
        if len(self._posted) <= self._most // 2 or self._packed_from.total():
            self._post()
        payload, work = self._posted.popleft()
        land(self._group, work)
        source = self._sources[self._taken]
        self._taken += 1
        self._posted_from[source] -= 1
        self._packed_from[source] -= payload.own
        return payload

    def _post(self) -> None:
        while self._next < len(self._chunks):
            source = self._sources[self._next]
            if (
                self._posted_from[source] >= self._most
                or self._packed_from[source] >= PACKED_IN_FLIGHT
            ):
                return
            payload = Payload(self._chunks[self._next], self._views, self._pool)
            work = self._group.recv([payload.bytes], source, self._tag + self._next)
            self._posted.append((payload, work))
            self._posted_from[source] += 1
            self._packed_from[source] += payload.own
            self._next += 1


def send_bytes(group: Any, data: bytes, targets: Sequence[int], tag: int) -> None:
    """Send a few bytes, and wait until all have them."""
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(wire_device(group))
    land(group, *[group.send([whole], target, tag) for target in targets])


def receive_bytes(group: Any, size: int, source: int, tag: int) -> bytes:
    """Receive `size` bytes."""
    buffer = torch.empty(size, dtype=torch.uint8, device=wire_device(group))
    land(group, group.recv([buffer], source, tag))
    return buffer.cpu().numpy().tobytes()
