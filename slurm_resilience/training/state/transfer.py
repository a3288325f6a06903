"""Moving state from memory to memory, as a plan says.

A target first gets a description from its first source, makes place, and then receives slices
straight into the tensors that its model uses; small tensors come packed. A target that is a relay
passes each message on as soon as it has it.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from slurm_resilience.mesh.model import View
from slurm_resilience.training.state.capture import Capture
from slurm_resilience.training.state.chunks import Chunk, cut, share
from slurm_resilience.training.state.descriptor import StateDescriptor, pack, unpack
from slurm_resilience.training.state.digest import digest
from slurm_resilience.training.state.errors import HealFailed, StateError
from slurm_resilience.training.state.plan import HealPlan
from slurm_resilience.training.state.routing import Route
from slurm_resilience.training.state.stream import (
    Payload,
    Pool,
    ReceiveQueue,
    SendQueue,
    receive_bytes,
    send_bytes,
    wire_device,
)
from slurm_resilience.training.state.tracked import Tracked

if TYPE_CHECKING:
    from slurm_resilience.training.state.partner import Partner

BUCKET_BYTES = 32 << 20
_HEADER = struct.Struct("<QQ")
"""Bytes of the description (0: this source sends none), checksum of the tensors' sizes."""
_HEADER_TAG, _SKELETON_TAG, _DIGEST_TAG, _FIRST_TAG = 0, 1, 2, 3
_RNG_TOO: dict[str, bool | None] = {"fresh": False, "memory": True}
"""At a fresh start everybody keeps its own seed; a copy in memory is this seat's own past."""


class TransferReport(msgspec.Struct, frozen=True):
    """What one rank did."""

    kind: str
    step: int
    received: int = 0
    """Bytes of tensors."""
    sent: int = 0
    seconds: float = 0.0
    sources: tuple[int, ...] = ()
    """Ranks that this one received from."""
    digest: str = ""
    """Of the state that the rank has now; empty: not computed."""
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
    """Do this rank's share of a plan. Whoever has nothing to do returns at once.

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
    begin = time.monotonic()
    incoming, outgoing = plan.incoming(rank), plan.outgoing(rank)
    run = _Run(process_group, plan, bucket_bytes, verify)
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
        seconds=time.monotonic() - begin,
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
        self.pool = Pool(wire_device(group))
        self.received = self.sent = 0
        self.digest = ""
        self.stages: list[str] = []

    def stage(self, name: str) -> _Stage:
        return _Stage(self.stages, name)

    def send(self, capture: Capture, outgoing: tuple[Route, ...]) -> None:
        """Send a state, or shares of it."""
        data = pack(capture.skeleton)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for one in outgoing:
            groups[one.share, one.shares].append(one.target_rank)
        for (number, shares), targets in groups.items():
            with self.stage(f"sent share {number + 1} of {shares} to {targets}"):
                self._describe(capture.skeleton, data if number == 0 else b"", targets)
                chunks, owners = self._cut(capture.skeleton, shares)
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
            data = receive_bytes(self.group, headers[0][0], first, _SKELETON_TAG)
            skeleton = unpack(data)
            if len({layout for _, layout in headers}) > 1 or headers[0][1] != _layout(skeleton):
                ranks = [one.source_rank for one in incoming]
                raise StateError(f"ranks {ranks} hold the same part with different tensors")
            views = tracked.prepare(skeleton)
            if below:
                self._describe(skeleton, data, below)
        with self.stage(f"received from {[one.source_rank for one in incoming]}"):
            self._stream(skeleton, views, incoming, below)
            tracked.finish(skeleton, rng_too=_RNG_TOO.get(self.plan.kind))
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
        skeleton: StateDescriptor,
        views: list[torch.Tensor],
        incoming: tuple[Route, ...],
        below: list[int],
    ) -> None:
        chunks, owners = self._cut(skeleton, incoming[0].shares)
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

    def _describe(self, skeleton: StateDescriptor, data: bytes, targets: list[int]) -> None:
        header = _HEADER.pack(len(data), _layout(skeleton))
        send_bytes(self.group, header, targets, _HEADER_TAG)
        if data:
            send_bytes(self.group, data, targets, _SKELETON_TAG)

    def _cut(
        self, skeleton: StateDescriptor, shares: int
    ) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        # Several sources fill the same two buckets of memory at the target.
        chunks = cut(skeleton.sizes, max(1, self.bucket_bytes // shares))
        return chunks, share(chunks, shares)


class _Stage:
    """Notes how long a stage took."""

    def __init__(self, stages: list[str], name: str) -> None:
        self._stages, self._name = stages, name

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            took = (time.monotonic() - self._begin) * 1000
            self._stages.append(f"{self._name}: {took:.0f} ms")


def _layout(skeleton: StateDescriptor) -> int:
    """Checksum of all tensors' descriptions: sources of one target must agree in it."""
    notes = [(n.path, n.shape, n.stride, n.dtype, n.placements) for n in skeleton.notes]
    return zlib.crc32(msgspec.msgpack.encode(notes))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
