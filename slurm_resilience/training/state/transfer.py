"""Move state from memory to memory, as a plan says.

A target first gets a descriptor from its first source, makes place, and then receives slices
straight into the tensors that its model uses; small tensors come packed. A target that is a relay
passes each message on as soon as it has it.

Sends and receives go through the group object itself, by ranks of the group: it need not be known
to torch.distributed. Slices of tensors cost no memory while they fly, so many may; of packed
messages there are two at a time.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from slurm_resilience.clock import SYSTEM_CLOCK, Clock
from slurm_resilience.mesh.model import View
from slurm_resilience.training import compat
from slurm_resilience.training.state import describe
from slurm_resilience.training.state.describe import Capture, StateDescriptor
from slurm_resilience.training.state.digest import digest
from slurm_resilience.training.state.errors import HealFailed, StateError
from slurm_resilience.training.state.plan import Chunk, HealPlan, Route, cut, share
from slurm_resilience.training.state.tracked import Tracked

if TYPE_CHECKING:
    from slurm_resilience.training.state.partner import Partner

BUCKET_BYTES = 32 << 20
_HEADER = struct.Struct("<QQ")
"""Bytes of the description (0: this source sends none), checksum of the tensors' sizes."""
_HEADER_TAG, _DESCRIPTOR_TAG, _DIGEST_TAG, _FIRST_TAG = 0, 1, 2, 3
_RNG_TOO: dict[str, bool | None] = {"fresh": False, "memory": True}
"""At a fresh start each rank keeps its own seed; a copy in memory is this seat's own past."""


class TransferReport(msgspec.Struct, frozen=True):
    """Report of one rank's part in a transfer."""

    kind: str
    step: int
    received: int = 0
    """Bytes of tensors."""
    sent: int = 0
    seconds: float = 0.0
    sources: tuple[int, ...] = ()
    """Ranks that this one received from."""
    digest: str = ""
    """Checksum of the state that the rank has now; empty: not computed."""
    stages: tuple[str, ...] = ()
    """Lines for the log."""


def transfer(
    plan: HealPlan,
    view: View,
    rank: int,
    tracked: Tracked,
    process_group: Any,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = False,
    partner: Partner | None = None,
) -> TransferReport:
    """Do this rank's share of a plan. A rank with nothing to do returns at once.

    Args:
        plan: the same at every member.
        view: the generation.
        rank: of this process.
        tracked: its state.
        process_group: has exactly the view's members, in rank order.
        bucket_bytes: greatest size of a message; about two of them are held beside the state.
        verify: compare the source's and the target's checksums at the end.
        partner: this process's in-memory copies; needed if the plan's kind is "memory".

    Raises:
        StateError: the plan is "impossible", or the peer's state does not fit this process.
        HealFailed: the transfer broke off, or the checksums differ. If this rank was to receive,
            it has no valid state now; a sender's is untouched.
    """
    if plan.kind == "impossible":
        raise StateError(plan.reason)
    incoming, outgoing = plan.incoming(rank), plan.outgoing(rank)
    run = _Run(process_group, plan, bucket_bytes, verify)
    begin = run.clock.monotonic()
    try:
        if plan.kind == "memory":
            _from_memory(run, view, incoming, outgoing, tracked, partner)
        elif incoming:
            run.receive(incoming, outgoing, tracked)
        elif outgoing:
            run.send(tracked.capture(), outgoing)
    except RuntimeError as error:
        what = "receiving" if incoming else "sending"
        raise HealFailed(f"{what} state broke off in step {plan.step}: {_line(error)}") from error
    return TransferReport(
        kind=plan.kind,
        step=plan.step,
        received=run.received,
        sent=run.sent,
        seconds=run.clock.monotonic() - begin,
        sources=tuple(t.source_rank for t in incoming),
        digest=run.digest,
        stages=tuple(run.stages),
    )


def _from_memory(
    run: _Run,
    view: View,
    incoming: tuple[Route, ...],
    outgoing: tuple[Route, ...],
    tracked: Tracked,
    partner: Partner | None,
) -> None:
    if incoming:
        run.receive(incoming, outgoing, tracked)
        return
    if partner is None:
        raise StateError("the plan goes back to copies in memory, and this process keeps none")
    for one in outgoing:
        seat = view.members[one.target_rank].peer.seat
        run.send(partner.give(seat, run.plan.step, one.part), (one,))
    with run.stage("own copy put back"):
        partner.restore_own(tracked, run.plan.step)


class _Run:
    """One rank's part in one transfer."""

    def __init__(self, group: Any, plan: HealPlan, bucket_bytes: int, verify: bool) -> None:
        self.group, self.plan, self.verify = group, plan, verify
        self.bucket_bytes = bucket_bytes
        self.clock: Clock = SYSTEM_CLOCK
        self.pool = Pool(compat.wire_device(group))
        self.received = self.sent = 0
        self.digest = ""
        self.stages: list[str] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note how long a stage took, if it succeeds."""
        begin = self.clock.monotonic()
        yield
        self.stages.append(f"{name}: {(self.clock.monotonic() - begin) * 1000:.0f} ms")

    def send(self, capture: Capture, outgoing: tuple[Route, ...]) -> None:
        """Send a state, or shares of it."""
        data = describe.to_bytes(capture.descriptor)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for one in outgoing:
            groups[one.share, one.shares].append(one.target_rank)
        for (number, shares), targets in groups.items():
            with self.stage(f"sent share {number + 1} of {shares} to {targets}"):
                self._describe(capture.descriptor, data if number == 0 else b"", targets)
                chunks, owners = self._cut(capture.descriptor, shares)
                outbox = SendQueue(self.group, targets, self.pool.device)
                for index, chunk in enumerate(chunks):
                    if owners[index] == number:
                        outbox.room()
                        payload = Payload(chunk, capture.views, self.pool).fill()
                        outbox.put(payload, _FIRST_TAG + index)
                        self.sent += chunk.size * len(targets)
                outbox.drain()
        if self.verify:
            self.digest = digest(capture)
            for (number, _), targets in groups.items():
                if number == 0:
                    send_bytes(self.group, self.digest.encode(), targets, _DIGEST_TAG)

    def receive(
        self, incoming: tuple[Route, ...], outgoing: tuple[Route, ...], tracked: Tracked
    ) -> None:
        """Receive a state, and pass it on."""
        first = incoming[0].source_rank
        below = [one.target_rank for one in outgoing]
        with self.stage("described and laid out"):
            headers = [
                _HEADER.unpack(
                    receive_bytes(self.group, _HEADER.size, one.source_rank, _HEADER_TAG)
                )
                for one in incoming
            ]
            data = receive_bytes(self.group, headers[0][0], first, _DESCRIPTOR_TAG)
            descriptor = describe.from_bytes(data)
            if len({layout for _, layout in headers}) > 1 or headers[0][1] != _layout(descriptor):
                ranks = [one.source_rank for one in incoming]
                raise StateError(f"ranks {ranks} hold the same part with different tensors")
            views = tracked.prepare(descriptor)
            if below:
                self._describe(descriptor, data, below)
        with self.stage(f"received from {[one.source_rank for one in incoming]}"):
            self._stream(descriptor, views, incoming, below)
            tracked.finish(descriptor, rng_too=_RNG_TOO.get(self.plan.kind))
        if self.verify:
            with self.stage("verified"):
                self.digest = tracked.digest()
                theirs = receive_bytes(self.group, len(self.digest), first, _DIGEST_TAG).decode()
                if theirs != self.digest:
                    raise HealFailed(
                        f"what arrived from rank {first} has checksum {self.digest}, "
                        f"there it is {theirs}"
                    )
                if below:
                    send_bytes(self.group, self.digest.encode(), below, _DIGEST_TAG)

    def _stream(
        self,
        descriptor: StateDescriptor,
        views: list[torch.Tensor],
        incoming: tuple[Route, ...],
        below: list[int],
    ) -> None:
        chunks, owners = self._cut(descriptor, incoming[0].shares)
        source_of = {one.share: one.source_rank for one in incoming}
        sources = [source_of[owner] for owner in owners]
        inbox = ReceiveQueue(self.group, chunks, sources, views, self.pool, _FIRST_TAG)
        outbox = SendQueue(self.group, below, self.pool.device)
        for index, chunk in enumerate(chunks):
            payload = inbox.take()
            payload.empty()
            self.received += chunk.size
            self.sent += chunk.size * len(below)
            outbox.room()
            outbox.put(payload, _FIRST_TAG + index)
        outbox.drain()

    def _describe(self, descriptor: StateDescriptor, data: bytes, targets: list[int]) -> None:
        header = _HEADER.pack(len(data), _layout(descriptor))
        send_bytes(self.group, header, targets, _HEADER_TAG)
        if data:
            send_bytes(self.group, data, targets, _DESCRIPTOR_TAG)

    def _cut(
        self, descriptor: StateDescriptor, shares: int
    ) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        # Several sources fill the same two buckets of memory at the target.
        bucket = max(1, self.bucket_bytes // shares)
        alike = cut([0 if note.may_differ else note.bytes for note in descriptor.notes], bucket)
        others = cut([note.bytes if note.may_differ else 0 for note in descriptor.notes], bucket)
        return alike + others, share(alike, shares) + (0,) * len(others)


def _layout(descriptor: StateDescriptor) -> int:
    """Checksum of the tensors' descriptions: sources of one target must agree in it."""
    notes = [
        (note.path, note.shape, note.stride, note.dtype, note.placements)
        for note in descriptor.notes
        if not note.may_differ
    ]
    return zlib.crc32(msgspec.msgpack.encode(notes))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


IN_FLIGHT = {"cpu": 1024, "cuda": 16}
"""Messages under way to, or from, one rank. Gloo shakes hands before each message, in the same
connection as the data: with 16 posted at a time 4 MB messages reach 60 % of what one large message
does, with all of them posted at once 100 %. NCCL starts a kernel for each."""
PACKED_IN_FLIGHT = 2
"""Messages among these with a buffer of their own."""


GLANCE_SECONDS = 0.05
"""Between two moments in which a wait for messages can be interrupted."""


def land(group: Any, *works: Any) -> None:
    """Wait for messages, as long as the group's collectives wait. The end of the world interrupts
    it: gloo loses a call whose connection ends in the middle of a message, and such a call waits
    for its time limit. So another thread makes it, and is left behind.

    By itself a message over gloo has the limit that the group was formed with. That one is short,
    and the rank that comes last may still have to build its model.
    """
    if compat.wire_device(group).type != "cpu":
        for work in works:
            work.wait()
        return
    limit, landed = compat.gloo_timeout(group), threading.Event()
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            for work in works:
                work.wait(limit)
        except RuntimeError as error:
            failed.append(error)
        finally:
            landed.set()

    threading.Thread(target=wait, name="sres-landing", daemon=True).start()
    while not landed.wait(GLANCE_SECONDS):
        pass
    if failed:
        raise failed[0]


class Pool:
    """Buffers for packed messages, used again and again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of `size` bytes."""
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
        """Give the buffer back: it is not read any more."""
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
        """Return the next message, arrived; to be emptied and freed."""
        # Only now: the message before has been emptied, so its buffer can be used again. Many at
        # once, as in `SendQueue.room`.
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
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(compat.wire_device(group))
    land(group, *[group.send([whole], target, tag) for target in targets])


def receive_bytes(group: Any, size: int, source: int, tag: int) -> bytes:
    """Receive `size` bytes."""
    buffer = torch.empty(size, dtype=torch.uint8, device=compat.wire_device(group))
    land(group, group.recv([buffer], source, tag))
    return buffer.cpu().numpy().tobytes()
