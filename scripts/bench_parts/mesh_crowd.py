"""Whole worlds of the mesh's pure protocol on a simulated clock and so many cores; no sockets.

Every process is a `Membership`, with a `Relay` where nodes have speakers. A turn of a process
takes simulated time on one of the cores that all share: so much for waking up, and so much for
each message that it reads or writes; and, if that is asked for, the processor time that its
protocol took just now. Where there are fewer cores than processes that have something to do, they
wait for each other, as real ones do.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from slurm_resilience.mesh.events import (
    BeatDue,
    Close,
    ConnectionClosed,
    ConnectionProven,
    CutBlock,
    Dial,
    DialKnown,
    EndGeneration,
    Event,
    Evicted,
    Finish,
    GaveUp,
    LocalBeat,
    LocalStatus,
    MessageReceived,
    Send,
    WorldWorked,
)
from slurm_resilience.mesh.messages import Bundle, Heartbeat, Message, Roster
from slurm_resilience.mesh.model import Peer, PeerStatus, Speakers, Timing
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.relay import Relay, Told
from slurm_resilience.mesh.protocol.world_plan import WorldRules

LATENCY_SECONDS = 50e-6
Calls = list[Callable[[], None]]


class Costs(NamedTuple):
    """Seconds of a core."""

    turn: float = 50e-6
    read: float = 40e-6
    write: float = 15e-6
    protocol: float = 0.0
    """For each second that the protocol itself took in this process. 0: a run can be repeated."""
    start: float = 0.0
    """For making the mesh, before its first turn."""

    def times(self, factor: float) -> Costs:
        """Return those of a machine that is so many times slower."""
        return Costs(*(cost * factor for cost in self))


class Process:
    """One rank: its protocol, its main thread, and what has arrived for it."""

    def __init__(self, crowd: Crowd, peer: Peer, rules: WorldRules, timing: Timing) -> None:
        self.peer = peer
        self.alive = True
        self.membership = Membership(peer, rules, timing, crowd.now)
        side = self.membership.side
        self.relay = (
            Relay(peer, crowd.now, side.speaker_patience, side.status_of)
            if crowd.speakers
            else None
        )
        self.inbox: deque[Event] = deque()
        self.links: dict[int, Process] = {}
        self.queued = False
        self.busy_until = 0.0
        self.read: Counter[str] = Counter()
        self.wrote: Counter[str] = Counter()
        self.turns = 0
        self.used = 0.0
        """Simulated seconds of a core."""
        self.seconds = 0.0
        """Real processor time of its protocol."""
        self.ended_at = 0.0
        self.entered_at = 0.0

    @property
    def wake_at(self) -> float:
        """When it wants to run, if nothing arrives."""
        at = self.membership.side.wake_at
        return at if self.relay is None else min(at, self.relay.wake_at)


class Crowd:
    """All processes of one training, and the cores that they share."""

    def __init__(
        self,
        ranks: int,
        node_ranks: int = 8,
        *,
        cores: int = 1_000_000,
        costs: Costs = Costs(),  # noqa: B008 - a frozen tuple
        speakers: bool = True,
        timing: Timing = Timing(),  # noqa: B008 - a frozen struct
    ) -> None:
        self.now = 0.0
        self.speakers = speakers
        self.given_up: list[str] = []
        self.worlds = 0
        self._costs = costs
        self._free = cores
        self._waiting: list[Process] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count(1)
        self._pairs: set[tuple[str, str]] = set()
        self._speaks: dict[str, Peer] = {}
        """The rank of each node that came first, as it is written down."""
        rules = WorldRules(ranks, 1)
        peers = [
            Peer(f"r{seat:05}", seat, node=f"n{seat // node_ranks}", seats=ranks)
            for seat in range(ranks)
        ]
        self.processes = {peer.id: Process(self, peer, rules, timing) for peer in peers}
        for number, process in enumerate(self.processes.values()):
            self._at(number * 1e-4, partial(self._start, process))

    # -- for a test or a benchmark ----------------------------------------------------------------

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Let time pass; tell whether it came to this within so many seconds."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call = heapq.heappop(self._heap)
            call()
            if until():
                return True
        return until()

    def living(self) -> list[Process]:
        """Those that have not been killed."""
        return [process for process in self.processes.values() if process.alive]

    def is_whole(self) -> bool:
        """Tell whether all living ones are in one world that goes on."""
        first = next(process for process in self.processes.values() if process.alive)
        if first.membership.side.status.phase != "running":
            return False  # as after most events
        living = self.living()
        sides = [process.membership.side for process in living]
        return (
            len({side.status.generation for side in sides}) == 1
            and all(side.status.phase == "running" and side.generation.goes_on for side in sides)
            and sides[0].generation.view is not None
            and sides[0].generation.view.size == len(living)
        )

    def kill(self, process: Process) -> None:
        """End a process; its kernel closes its connections."""
        process.alive = False
        for number, other in process.links.items():
            self._deliver(other, ConnectionClosed(number))
        process.links.clear()

    def frames(self, kinds: bool = False) -> Any:
        """Return how many frames were read, in all or by kind."""
        total: Counter[str] = Counter()
        for process in self.processes.values():
            total += process.read
        return total if kinds else sum(total.values())

    # -- time -------------------------------------------------------------------------------------

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._count), call))

    def _deliver(self, process: Process, event: Event) -> None:
        self._at(self.now + LATENCY_SECONDS, lambda: self._arrive(process, event))

    def _arrive(self, process: Process, event: Event) -> None:
        if process.alive:
            process.inbox.append(event)
            if not _is_quiet(event):
                self._queue(process)

    def _queue(self, process: Process) -> None:
        if not process.queued and process.alive:
            process.queued = True
            self._waiting.append(process)
            self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            # As a kernel does: the one that has had the least goes first, so the busy ones wait.
            process = min(self._waiting, key=lambda waiting: waiting.used)
            self._waiting.remove(process)
            if process.alive:
                self._free -= 1
                self._turn(process)
            else:
                process.queued = False

    # -- a process's turn -------------------------------------------------------------------------

    def _start(self, process: Process) -> None:
        if process.relay is None:
            self._known(process)
        else:
            here = self._speaks.setdefault(process.peer.node, process.peer)
            before = tuple(self._speaks.values())[:-1] if here is process.peer else ()
            out: Calls = []
            self._links(process, process.relay.begin(Speakers(here, before), self.now), out)
            for call in out:
                call()
        process.inbox.append(LocalStatus(PeerStatus()))
        self._queue(process)

    def _turn(self, process: Process) -> None:
        out: Calls = []
        events, process.inbox = process.inbox, deque()
        process.turns += 1
        wrote = sum(process.wrote.values())
        began = time.process_time()
        for event in events:
            self._take(process, event, out)
        self._do(process, process.membership.tick(self.now), out)
        if process.relay is not None:
            self._links(process, process.relay.tick(self.now), out)
        self._main(process, out)
        if process.relay is not None:
            self._links(process, process.relay.flush(self.now), out)
        protocol = time.process_time() - began
        process.seconds += protocol
        wrote = sum(process.wrote.values()) - wrote
        costs = self._costs
        cost = costs.turn + costs.read * len(events) + costs.write * wrote
        cost += costs.protocol * protocol + (costs.start if process.turns == 1 else 0.0)
        process.used += cost
        self._at(self.now + cost, lambda: self._finish(process, out))

    def _finish(self, process: Process, out: Sequence[Callable[[], None]]) -> None:
        self._free += 1
        process.queued = False
        if process.alive:
            for call in out:
                call()
            if any(not _is_quiet(event) for event in process.inbox):
                self._queue(process)
            else:
                self._sleep(process)
        self._serve()

    def _sleep(self, process: Process) -> None:
        at = process.wake_at

        def wake() -> None:
            if process.alive and not process.queued and process.wake_at <= self.now + 1e-9:
                self._queue(process)

        self._at(at, wake)

    def _take(self, process: Process, event: Event, out: Calls) -> None:
        if isinstance(event, MessageReceived):
            if event.connection not in process.links:
                return
            process.read[type(event.message).__name__] += 1
        if isinstance(event, ConnectionClosed):
            process.links.pop(event.connection, None)
        if process.relay is None or isinstance(event, LocalStatus):
            self._do(process, process.membership.step(event, self.now), out)
        else:
            self._links(process, process.relay.step(event, self.now), out)

    def _links(self, process: Process, effects: Sequence[Any], out: Calls) -> None:
        for effect in effects:
            match effect:
                case Told(event=event):
                    self._do(process, process.membership.step(event, self.now), out)
                case Send(connections=numbers, message=message):
                    self._send(process, numbers, message, out)
                case Dial(peer=peer):
                    out.append(partial(self._dial, process, peer))
                case DialKnown():
                    self._known(process)
                case Close(connection=number):
                    other = process.links.pop(number, None)
                    out.append(partial(self._close, process, number, other))

    def _do(self, process: Process, effects: Sequence[Any], out: Calls) -> None:
        side = process.membership.side
        for effect in effects:
            match effect:
                case Send() | Close() | Finish() | Dial():
                    if process.relay is None:
                        self._links(process, [effect], out)
                    else:
                        self._links(process, process.relay.carry(effect, self.now), out)
                case DialKnown():
                    self._known(process)
                case BeatDue():
                    self._do(process, process.membership.step(LocalBeat(), self.now), out)
                case EndGeneration():
                    process.ended_at = self.now
                case CutBlock() if side.status.phase == "running":
                    word = PeerStatus("ready", side.status.generation, 0)
                    process.inbox.append(LocalStatus(word))
                case GaveUp(peer=peer, reason=reason):
                    self.given_up.append(f"{process.peer.id} gives {peer.id} up: {reason}")
                case Evicted(reason=reason):
                    self.given_up.append(f"{process.peer.id} leaves: {reason}")

    def _main(self, process: Process, out: Calls) -> None:
        side = process.membership.side
        view = side.invitation()
        if view is not None and side.status.phase == "ready":
            process.entered_at = self.now
            word = PeerStatus("running", view.generation, 0)
            for event in (LocalStatus(word), WorldWorked(view)):
                self._do(process, process.membership.step(event, self.now), out)

    # -- links ------------------------------------------------------------------------------------

    def _known(self, process: Process) -> None:
        relay, node = process.relay, process.peer.node
        for other in self.processes.values():
            if relay is None or (other.peer.node == node and not relay.is_starting(self.now)):
                self._dial(process, other.peer)
            elif other.peer.node != node and relay.looks_beyond:
                self._links(process, relay.carry(Dial(other.peer), self.now), [])

    def _dial(self, process: Process, peer: Peer) -> None:
        other = self.processes[peer.id]
        pair = (min(process.peer.id, peer.id), max(process.peer.id, peer.id))
        if other is process or not other.alive or not process.alive or pair in self._pairs:
            return
        self._pairs.add(pair)
        number = next(self._count)
        for one, two, dialed in ((process, other, True), (other, process, False)):
            one.links[number] = two
            status = two.membership.side.status
            self._deliver(one, ConnectionProven(number, two.peer, status, dialed))
        near = (contact.peer for contact in other.membership.side.contacts.seated())
        known = Roster(tuple(one for one in near if one.node == other.peer.node))
        self._deliver(process, MessageReceived(number, peer.id, peer.id, known))

    def _close(self, process: Process, number: int, other: Process | None) -> None:
        if other is not None:
            self._pairs.discard(
                (min(process.peer.id, other.peer.id), max(process.peer.id, other.peer.id))
            )
            self._deliver(other, ConnectionClosed(number))

    def _send(
        self,
        process: Process,
        numbers: Sequence[int],
        message: Message,
        out: Calls,
    ) -> None:
        for number in numbers:
            other = process.links.get(number)
            if other is not None:
                process.wrote[type(message).__name__] += 1
                event = MessageReceived(number, process.peer.id, process.peer.id, message)
                out.append(partial(self._deliver, other, event))


def _is_quiet(event: Event) -> bool:
    message = event.message if isinstance(event, MessageReceived) else None
    return isinstance(message, Heartbeat) or (isinstance(message, Bundle) and message.quiet)
