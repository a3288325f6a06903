"""Simulated connections: delayed, in order within one, held by cuts, reset and lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from slurm_resilience.mesh.model import CloseCause
from slurm_resilience.simulate.schedule import Schedule

UNACKED_SECONDS = 1.6
"""A connection ends whose data does not arrive for so long."""
SLOWEST_SECONDS = 0.2
"""A delivery takes so long at most; most take a few milliseconds."""

CLOSED = object()
"""In a queue: the sender has closed its side."""


class Endpoint(Protocol):
    """A process, as the network sees it."""

    id: str

    @property
    def alive(self) -> bool:
        """Tell whether the process runs, or is stopped."""
        ...

    @property
    def powered(self) -> bool:
        """Tell whether its machine is up: a dead process's kernel still answers."""
        ...

    def receive(self, connection: SimConnection, item: Any) -> None:
        """Take something in that has arrived."""
        ...

    def lose(self, connection: SimConnection, cause: CloseCause) -> None:
        """Take the end of a connection in."""
        ...


class SimConnection:
    """Two directions, each with a queue; side 0 dialed."""

    __slots__ = ("ends", "number", "open", "proven", "pumping", "queues", "ready", "stalled")

    def __init__(self, number: int, dialer: Endpoint, listener: Endpoint) -> None:
        self.number = number
        self.ends = (dialer, listener)
        self.open = [True, True]
        self.proven = [False, False]
        self.queues: tuple[deque[Any], deque[Any]] = (deque(), deque())
        """By the sending side."""
        self.ready = [0.0, 0.0]
        """When the last thing in each queue will have arrived."""
        self.stalled: list[float | None] = [None, None]
        """Since when a queue is held by a cut."""
        self.pumping = [False, False]

    def side(self, end: Endpoint) -> int:
        """Return 0 for the process that dialed, 1 for the other one."""
        return 0 if self.ends[0] is end else 1

    def other(self, end: Endpoint) -> Endpoint:
        """Return the process at the other end."""
        return self.ends[1 - self.side(end)]


class SimNetwork:
    """All connections, and where the network is cut."""

    def __init__(self, schedule: Schedule, random: Random) -> None:
        self._schedule = schedule
        self._random = random
        self.place: Callable[[str], str] = str
        """Return where a process is, by its id: nothing is cut within one place."""
        self.resends: Random | None = None
        """Draws when what a cut has held is sent again, after it; None: at once, and so before
        anything that is said over a newer connection."""
        self._numbers = 0
        self._islands: dict[str, int] = {}
        self._broken: set[frozenset[str]] = set()
        self.connections: dict[int, SimConnection] = {}

    def delay(self) -> float:
        """Return the time that one delivery takes."""
        return float(self._random.random() ** 8 * SLOWEST_SECONDS + 0.0005)

    # -- cuts ---------------------------------------------------------------------------------

    def blocked(self, one: str, other: str) -> bool:
        """Tell whether nothing passes between two processes."""
        one, other = self.place(one), self.place(other)
        if one == other:
            return False
        if self._islands and self._islands.get(one, 0) != self._islands.get(other, 0):
            return True
        return bool(self._broken) and frozenset((one, other)) in self._broken

    @property
    def whole(self) -> bool:
        """Tell whether there is no cut."""
        return not self._islands and not self._broken

    def cut(self, islands: dict[str, int]) -> None:
        """Part the processes; those that are not named are on island 0."""
        self._islands = {self.place(one): island for one, island in islands.items()}

    def cut_pair(self, one: str, other: str) -> None:
        """Cut two processes off from each other."""
        self._broken.add(frozenset((self.place(one), self.place(other))))

    def mend_pair(self, one: str, other: str) -> None:
        """Undo `cut_pair`."""
        self._broken.discard(frozenset((self.place(one), self.place(other))))
        self._resume()

    def heal(self) -> None:
        """Undo `cut`."""
        self._islands = {}
        self._resume()

    def heal_all(self) -> None:
        """Undo all cuts."""
        self._broken.clear()
        self.heal()

    def _resume(self) -> None:
        for connection in list(self.connections.values()):
            for side in (0, 1):
                since = connection.stalled[side]
                if since is not None and self.resends is not None:
                    # A kernel that tries in vain doubles its pause each time.
                    wait = self.resends.random() * (self._schedule.now - since)
                    self._schedule.after(wait, self._pump, connection, side)
                elif since is not None:
                    self._pump(connection, side)

    # -- connections --------------------------------------------------------------------------

    def connect(self, dialer: Endpoint, listener: Endpoint) -> SimConnection:
        """Make a connection, whose handshake has not begun."""
        self._numbers += 1
        connection = SimConnection(self._numbers, dialer, listener)
        self.connections[self._numbers] = connection
        return connection

    def send(self, connection: SimConnection, end: Endpoint, item: Any) -> None:
        """Have something arrive at the other end, after all that was sent before."""
        side = connection.side(end)
        now = self._schedule.now
        arrives = max(connection.ready[side], now + self.delay())
        connection.ready[side] = arrives
        connection.queues[side].append((arrives, item))
        if not connection.pumping[side] and connection.stalled[side] is None:
            connection.pumping[side] = True
            self._schedule.at(arrives, self._pump, connection, side)

    def close(self, connection: SimConnection, end: Endpoint) -> None:
        """Close one side; what was sent before still arrives."""
        side = connection.side(end)
        if connection.open[side]:
            connection.open[side] = False
            self.send(connection, end, CLOSED)

    def abort(self, connection: SimConnection, end: Endpoint) -> None:
        """End one side with unread data: its kernel answers with a reset."""
        side = connection.side(end)
        connection.open[side] = False
        if not self.blocked(connection.ends[0].id, connection.ends[1].id):
            self._schedule.after(self.delay(), self._end, connection, 1 - side, "reset")

    def finish(self, connection: SimConnection, end: Endpoint) -> None:
        """Send nothing more from one side; what still arrives is read."""
        self.send(connection, end, CLOSED)

    def vanish(self, connection: SimConnection, end: Endpoint) -> None:
        """Take one side's machine away: nothing of it arrives, and nothing is answered."""
        side = connection.side(end)
        connection.open[side] = False
        connection.queues[side].clear()
        self._schedule.after(UNACKED_SECONDS, self._time_out, connection, 1 - side, None)

    def reset(self, connection: SimConnection) -> None:
        """End a connection at both ends at once, although both processes live."""
        for side in (0, 1):
            connection.queues[side].clear()
            self._end(connection, side, "reset")

    def _pump(self, connection: SimConnection, side: int) -> None:
        connection.pumping[side] = False
        queue = connection.queues[side]
        if not queue:
            connection.stalled[side] = None
            return
        sender, receiver = connection.ends[side], connection.ends[1 - side]
        if self.blocked(sender.id, receiver.id):
            if connection.stalled[side] is None:
                now = self._schedule.now
                connection.stalled[side] = now
                self._schedule.after(UNACKED_SECONDS, self._time_out, connection, side, now)
            return
        connection.stalled[side] = None
        now = self._schedule.now
        while queue and queue[0][0] <= now:
            _, item = queue.popleft()
            self._deliver(connection, side, item)
        if queue and not connection.pumping[side]:
            connection.pumping[side] = True
            self._schedule.at(queue[0][0], self._pump, connection, side)

    def _deliver(self, connection: SimConnection, side: int, item: Any) -> None:
        receiver = connection.ends[1 - side]
        if item is CLOSED:
            self._end(connection, 1 - side, "closed")
            if connection.open[side]:
                self.send(connection, receiver, CLOSED)
        elif connection.open[1 - side] and receiver.alive:
            receiver.receive(connection, item)
        elif connection.open[side]:
            # A living machine's kernel knows of no such connection; a dead one says nothing.
            wait = self.delay() if receiver.powered else UNACKED_SECONDS
            cause: CloseCause = "reset" if receiver.powered else "lost"
            self._schedule.after(wait, self._end, connection, side, cause)

    def _time_out(self, connection: SimConnection, side: int, since: float | None) -> None:
        if connection.stalled[side] == since:
            self._end(connection, side, "lost")

    def _end(self, connection: SimConnection, side: int, cause: CloseCause) -> None:
        if connection.open[side]:
            connection.open[side] = False
            connection.ends[side].lose(connection, cause)
        if not any(connection.open):
            self.connections.pop(connection.number, None)
