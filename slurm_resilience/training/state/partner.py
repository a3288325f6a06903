"""Copies of the state in the memory of two nodes, for models whose parts exist only once.

Every few steps each rank copies its state to host memory, and sends that copy to its partner while
the next steps run. A round counts only when every rank has both its own and its partner's copy
whole; until then, and until every rank has said so, the round before is kept. A fault at any moment
leaves one round that all ranks have.

A thread beside the steps exchanges the copies, in rounds: all say whether they have a copy of this
step (if one has none, the round is left out); each sends its own and receives the one to keep; all
wait for all, and publish; all wait for all again, and only then let go of the round before.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.mesh.model import View
from slurm_resilience.training import thread_ends
from slurm_resilience.training.state import describe
from slurm_resilience.training.state.describe import Capture, StateDescriptor
from slurm_resilience.training.state.errors import StateError
from slurm_resilience.training.state.plan import cut, partners
from slurm_resilience.training.state.tracked import Tracked

_BUCKET_BYTES = 32 << 20
_IN_FLIGHT = 16
"""Messages under way to one rank, each of up to 32 MB."""
_HEADER_WORDS = 5
_HEADER_TAG, _DESCRIPTOR_TAG, _FIRST_TAG = 0, 1, 2


class PartnerCopy(NamedTuple):
    """One rank's state at one step, in host memory."""

    step: int
    seat: int
    part: int
    descriptor: StateDescriptor
    data: torch.Tensor
    """uint8 of shape (bytes,): all tensors, one after another."""

    def capture(self) -> Capture:
        """As something that can be sent."""
        return Capture(self.descriptor, torch.split(self.data, list(self.descriptor.sizes)))


class Round(NamedTuple):
    """The copies that a rank has of one step."""

    own: PartnerCopy
    kept: PartnerCopy | None
    """The copy of the rank whose partner this one is; None in a world of one."""


class CopyHolder(Protocol):
    """A place for copies."""

    def buffer(self, size: int) -> torch.Tensor:
        """Host memory of `size` bytes."""

    def publish(self, one: Round, seconds: float) -> None:
        """Take a round that every rank has whole, after so many seconds."""

    def settle(self, unused: PartnerCopy | None = None) -> None:
        """Let older rounds go, and this copy too: every rank has published the newest."""


class Exchange:
    """The thread that exchanges copies during one generation."""

    def __init__(self, copies: CopyHolder, view: View, rank: int, group: Any) -> None:
        self._copies, self._group = copies, group
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
        thread_ends.at_exit(self.close)

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

    def close(self, timeout: float = thread_ends.PATIENCE_SECONDS) -> None:
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
        begin = SYSTEM_CLOCK.monotonic()
        if not self._all_have(own):
            self._copies.settle(own)
            return
        assert own is not None
        kept = None if self._alone else self._exchange(own)
        self._together()
        self._copies.publish(Round(own, kept), SYSTEM_CLOCK.monotonic() - begin)
        self._together()
        self._copies.settle()

    def _all_have(self, own: PartnerCopy | None) -> bool:
        flag = torch.tensor([0 if own is None else 1], dtype=torch.int64, device="cpu")
        if not self._alone:
            self._group.allreduce([flag], torch.distributed.ReduceOp.MIN).wait()
        return bool(flag.item())

    def _together(self) -> None:
        if not self._alone:
            self._group.barrier().wait()

    def _exchange(self, own: PartnerCopy) -> PartnerCopy:
        """Send the own copy, and receive the one to keep."""
        descriptor = describe.to_bytes(own.descriptor)
        words = [own.step, own.seat, own.part, len(descriptor), own.data.numel()]
        header = torch.zeros(_HEADER_WORDS, dtype=torch.int64, device="cpu")
        self._swap([torch.tensor(words, device="cpu")], [header], _HEADER_TAG)
        step, seat, part, length, size = header.tolist()
        described = torch.empty(length, dtype=torch.uint8, device="cpu")
        mine = torch.frombuffer(bytearray(descriptor), dtype=torch.uint8)
        self._swap([mine], [described], _DESCRIPTOR_TAG)
        data = self._copies.buffer(size)
        self._swap(_slices(own.data), _slices(data), _FIRST_TAG)
        return PartnerCopy(step, seat, part, describe.from_bytes(described.numpy().tobytes()), data)

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


class Cost(NamedTuple):
    """Cost of one snapshot."""

    step: int
    bytes: int
    blocked_ms: float
    """The step waited this long."""
    behind_ms: float = 0.0
    """Until every rank had it, while steps went on; 0: not yet known."""

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
        certified: the newest certified round is kept beside a newer one that is not.
    """

    def __init__(self, every: int = 1, *, certified: bool = False) -> None:
        self.every = max(1, every)
        self._keeps_certified = certified
        self._certified_until = -1
        self._settled = True
        """Every rank has published the newest round."""
        self._frozen = False
        """The others were told of the newest round: none comes before the next world."""
        self.last: Cost | None = None
        self._lock = threading.Lock()
        self._rounds: tuple[Round, ...] = ()
        """Newest first. More than one until every rank has published the newest, and where that
        is not certified."""
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
            process_group: of all members in rank order, CPU (gloo), for this alone: the copies
                travel on it while the training uses its own.
        """
        self.close()
        self._frozen = False
        self._link = Exchange(self, view, rank, process_group)

    def close(self, timeout: float = 5.0) -> None:
        """End the generation: an unfinished round is dropped. Close the group's sockets before,
        or a round that waits for a lost peer lasts until `timeout` seconds."""
        link, self._link = self._link, None
        if link:
            link.close(timeout)

    def freeze(self) -> None:
        """Take no more rounds of this generation: the others plan from what they are told now. A
        rank that has published one keeps the one before it as well, since this one never does."""
        with self._lock:
            self._frozen = True

    def due(self, step: int) -> bool:
        """Tell whether a snapshot of this committed step is wanted."""
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
        begin = SYSTEM_CLOCK.monotonic()
        capture = tracked.capture()
        data = self.buffer(capture.descriptor.total)
        for view, place in zip(
            capture.views, torch.split(data, list(capture.descriptor.sizes)), strict=True
        ):
            place.copy_(view)
        took = (SYSTEM_CLOCK.monotonic() - begin) * 1000
        own = PartnerCopy(step, link.seat, link.part, capture.descriptor, data)
        self.last = cost = Cost(step, data.numel(), took)
        link.post(step, own)
        return cost

    def wait(self, timeout: float) -> bool:
        """Wait until no round runs. False: one still does after `timeout` seconds."""
        link = self._link
        return link is None or link.idle(timeout)

    @property
    def error(self) -> str:
        """The reason why copies stopped in this generation; empty: they did not."""
        return self._link.error if self._link else ""

    def restore_own(self, tracked: Tracked, step: int) -> None:
        """Go back to this rank's own copy, random states included.

        Raises:
            StateError: there is no such copy, or it does not fit.
        """
        own = self._round(step).own
        views = tracked.prepare(own.descriptor)
        for view, there in zip(views, own.capture().views, strict=True):
            view.copy_(there)
        tracked.finish(own.descriptor, rng_too=True)
        with self._lock:
            # A later round belongs to steps that will be done anew.
            self._rounds = tuple(one for one in self._rounds if one.own.step <= step)

    def give(self, seat: int, step: int, part: int) -> Capture:
        """Return the copy that a lost seat needs: its own, kept here, or that of the same part.

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
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)

    def publish(self, one: Round, seconds: float) -> None:
        """Take a round that every rank has whole; called by the exchange.

        Raises:
            StateError: it comes too late.
        """
        with self._lock:
            if self._frozen:
                raise StateError(f"the copy of step {one.own.step} was not whole when it was left")
            self._settled = False
            self._rounds = (one, *self._rounds[: 2 if self._keeps_certified else 1])
        if self.last and self.last.step == one.own.step:
            self.last = self.last._replace(behind_ms=seconds * 1000)

    def settle(self, unused: PartnerCopy | None = None) -> None:
        """Let go of rounds that are not needed, but for their buffers; called by the exchange."""
        with self._lock:
            self._settled = True
            self._let_go()
            self._spare += [unused.data] if unused else []

    # -- certified rounds ---------------------------------------------------------------------

    @property
    def certified(self) -> int:
        """The step of the newest certified round; -1: none."""
        with self._lock:
            return max(
                (one.own.step for one in self._rounds if self._is_certified(one)), default=-1
            )

    def certify(self, until: int) -> None:
        """Take rounds up to this step for good."""
        with self._lock:
            self._certified_until = until
            if self._settled:
                self._let_go()

    def drop_after(self, step: int) -> None:
        """Let go of rounds that are newer than a step, to which all go back."""
        with self._lock:
            self._rounds = tuple(one for one in self._rounds if one.own.step <= step)

    def begin_at(self, step: int) -> None:
        """Note the step from which the training goes on: what comes after it is done anew, and is
        not certified."""
        with self._lock:
            self._certified_until = min(self._certified_until, step)

    def _is_certified(self, one: Round) -> bool:
        return self._keeps_certified and one.own.step <= self._certified_until

    def _let_go(self) -> None:
        kept = self._rounds[:1]
        if self._keeps_certified and kept and not self._is_certified(kept[0]):
            kept += tuple(one for one in self._rounds[1:] if self._is_certified(one))[:1]
        gone = [one for one in self._rounds if all(one is not other for other in kept)]
        old = [copy for one in gone for copy in one if copy]
        self._rounds = kept
        self._spare += [copy.data for copy in old]
