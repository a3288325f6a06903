"""The mesh: one thread that keeps a connection to every other process of the training.

A closed connection is a dead process, and everybody knows it within a millisecond. Status, breaks,
generations and the store's keys travel over the same connections, in order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable

import msgspec

from slurm_resilience.errors import AuthError, WireError
from slurm_resilience.mesh import layout, messages
from slurm_resilience.mesh.layout import Rules
from slurm_resilience.mesh.link import HANDSHAKE_SECONDS, Link
from slurm_resilience.mesh.meeting import Meeting
from slurm_resilience.mesh.messages import (
    Beat,
    Bye,
    Change,
    Changed,
    Evict,
    Finding,
    Form,
    Message,
    Over,
    Put,
    Say,
)
from slurm_resilience.mesh.model import (
    Break,
    Member,
    Peer,
    Status,
    View,
    counter_of,
    generation_number,
)

log = logging.getLogger("sres.mesh")

BEAT = 0.5
"""Seconds between two beats."""
SILENCE = 5.0
"""Seconds without a word after which a peer is taken for hung or gone."""
SHORT_SILENCE = 3 * BEAT
"""The same once a generation is over and everybody should be talking."""
AGAIN = 0.01
"""Seconds between two calls of `on_end` while the main thread is still in its block: a call that
was not cut the first time is cut the next."""
REACH_SECONDS = 3.0
"""Within this time every member of a new generation must have reached every other."""
OUTCOME_SECONDS = 1.0
"""Seconds between two looks whether the training is over, for a process that found nobody."""
STRIKES = 2
"""Generations that failed because of one peer, before the others go on without it."""
REDIAL = 0.2
"""Seconds until an address that did not answer is tried again (fixed addresses only)."""


class Stopped(Exception):
    """The training was given up by one of its processes."""


class Mesh:
    """This process among the others. Its methods may be called from any thread."""

    def __init__(
        self,
        meeting: Meeting,
        me: Peer,
        rules: Rules,
        *,
        abort_timeout: float = 5.0,
        silence: float = SILENCE,
        on_end: Callable[[Break], None] | None = None,
        on_evict: Callable[[str], None] | None = None,
        on_tick: Callable[[float], Beat | None] | None = None,
        on_given_up: Callable[[Peer, str], None] | None = None,
    ) -> None:
        """
        Args:
            meeting: where the others are found.
            me: this process; ``host`` is what it listens on, ``port`` 0 lets the kernel choose.
            rules: when a generation may be formed.
            abort_timeout: seconds after the end of a generation in which a peer must be out of its
                block; then the others go on without it.
            silence: seconds without a beat after which a peer counts as hung.
            on_end: called in the mesh's thread when the current generation ends, and every 10 ms
                again until `ready` or `done` is called.
            on_evict: called in the mesh's thread when the others go on without this process.
            on_tick: called in the mesh's thread before each beat; gives the beat to send.
            on_given_up: called in the mesh's thread with a peer that the others go on without.

        Raises:
            UsageError: the meeting place cannot be used.
            OSError: the port cannot be listened on.
        """
        self._meeting = meeting
        self._secret = meeting.secret()
        self._rules = rules
        self._abort_timeout = abort_timeout
        self._silence = silence
        self._on_end = on_end or (lambda _: None)
        self._on_evict = on_evict or (lambda _: None)
        self._on_tick = on_tick or (lambda _: None)
        self._on_given_up = on_given_up or (lambda _peer, _reason: None)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(
            (me.host, me.port or meeting.port(me.seat)), backlog=1024
        )
        self._listener.setblocking(False)
        self.me = msgspec.structs.replace(me, port=self._listener.getsockname()[1])
        self.status = Status()
        self._said = 0
        self._links: dict[str, Link] = {}
        self._raw: set[Link] = set()
        self._lost: dict[str, bool] = {}
        """Peers that are gone: id → known to be dead."""
        self._given_up: set[str] = set()
        """Peers that did not leave their block in time."""
        self._bad_nodes: dict[str, Finding] = {}
        self._redial: dict[tuple[str, int], float] = {}
        self._view: View | None = None
        self._worked: View | None = None
        self._highest = 0
        self._end: Break | None = None
        self._ended_at = 0.0
        self._adopted_at = 0.0
        self._ask_outcome = 0.0
        self._strikes: dict[str, int] = {}
        self._last_cut = 0.0
        self._since = time.monotonic()
        self._look_again: float | None = None
        self._waits_for = ""
        self._keys: dict[int, dict[str, bytes]] = {}
        self._own_puts: list[Put] = []
        """What this process has set in this generation, for members that are reached later."""
        self._answers: dict[int, bytes] = {}
        self._numbers = 0
        self._evicted = ""
        self._finished = False
        self._stopped: Break | None = None
        self.knock = threading.Event()
        """Set when somebody may be waiting outside of the current generation."""
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._next_beat = time.monotonic() + BEAT
        self._thread = threading.Thread(target=self._run, name="sres-mesh", daemon=True)

    def start(self) -> Mesh:
        """Start its thread; the others can see this process from now on."""
        self._meeting.enter(self.me)
        self._dial_known()
        self._thread.start()
        return self

    # -- what the main thread does ------------------------------------------------------------

    @property
    def end(self) -> Break | None:
        """How the current generation ended; None while it goes on."""
        return self._end

    @property
    def evicted(self) -> str:
        """Why the others go on without this process; empty while they do not."""
        return self._evicted

    @property
    def waits_for(self) -> str:
        """Why no generation is formed at the moment, in words."""
        return self._waits_for

    def own_fds(self) -> set[int]:
        """File descriptors of this mesh, which nobody else may close."""
        with self._lock:
            links = [link.fileno() for link in (*self._links.values(), *self._raw)]
            return {self._listener.fileno(), self._wake, *links}

    def quiet(self) -> threading.RLock:
        """Hold this lock, and the mesh neither opens nor closes a socket."""
        return self._lock

    def say(self, status: Status) -> None:
        """Tell everybody."""
        with self._lock:
            if status.phase != "running" and self.status.phase == "running":
                self._since = time.monotonic()
            self.status = status
            self._said += 1
            self._broadcast(Say(self._said, status))
            self._changed.notify_all()
        self._ring()

    def meet(self, timeout: float | None = None) -> View | None:
        """Wait for the next generation, outside of the block (`say` a status `ready` or `done`
        before).

        Returns:
            The generation; None when everybody is done.

        Raises:
            TimeoutError: none within ``timeout`` seconds; the message says what is waited for.
            WireError: the others go on without this process.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._stopped:
                    raise Stopped(self._stopped.reason)
                if self._evicted:
                    raise WireError(f"the others go on without this process: {self._evicted}")
                view = self._view
                if view and view.generation > self.status.generation and self._end is None:
                    return view
                if self._finished or self._all_done() or self._too_late():
                    return None
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(self._waits_for or "no generation was formed")
                self._changed.wait(min(left or OUTCOME_SECONDS, OUTCOME_SECONDS))

    def _too_late(self) -> bool:
        """Came when the others had finished. (Asked about once a second.)"""
        now = time.monotonic()
        if self._worked is not None or self._usable() or now < self._ask_outcome:
            return False
        self._ask_outcome = now + OUTCOME_SECONDS
        ended = self._meeting.ended()
        return ended is not None and ended.code == 0

    @property
    def current(self) -> View | None:
        """The generation that this process was last a member of."""
        return self._view

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the current generation has ended, or the time is over."""
        with self._changed:
            if self._end is None:
                self._changed.wait(seconds)

    def wait_until_out(self, seconds: float) -> bool:
        """Wait until the main thread has left its block; False when it has not within the time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.status.phase == "running" and not self._closing:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def stop(self, end: Break) -> None:
        """End the training for everybody, whatever generation they are in."""
        with self._lock:
            self._broadcast(Over(end))
        self._ring()

    def worked(self, view: View) -> None:
        """Every member of this generation could talk to every other: it counts from now on."""
        with self._lock:
            self._worked = view
            here = {member.peer.id for member in view.members}
            self._lost = {name: dead for name, dead in self._lost.items() if name in here}

    def over(self, end: Break) -> None:
        """End a generation for everybody, at once."""
        with self._lock:
            self._over(end)
        self._ring()

    def newcomers(self) -> tuple[Peer, ...]:
        """Live peers that wait outside of the current generation and would make it larger."""
        with self._lock:
            if self._view is None:
                return ()
            inside = {member.peer.id for member in self._view.members}
            waiting = [
                Member(link.peer, link.status)
                for link in self._usable()
                if link.peer and link.peer.id not in inside and link.status.phase == "ready"
            ]
            if not waiting:
                self.knock.clear()
                return ()
            ours = [
                member
                for member in self._view.members
                if member.peer.id == self.me.id or member.peer.id in self._links
            ]
            size = self._rules.replica_size
            after = layout.arrange(layout.one_a_seat([*ours, *waiting]), size)
            if len(after) <= self._view.size:
                return ()
            return tuple(member.peer for member in waiting)

    def beats(self) -> dict[str, tuple[Peer, Beat, float]]:
        """What each other peer last beat, and seconds since anything was heard of it."""
        now = time.monotonic()
        with self._lock:
            return {
                name: (link.peer, link.beat, now - link.heard)
                for name, link in self._links.items()
                if link.peer and link.peer.seat >= 0
            }

    def picture(self) -> tuple[View | None, list[Member], dict[str, bool]]:
        """The generation that works, everybody alive, and who was lost since."""
        with self._lock:
            return self._worked, self._present(), dict(self._lost)

    def close(self, reason: str = "") -> None:
        """Leave."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._broadcast(Bye(reason))
        self._ring()
        self._thread.join(2.0)
        self._meeting.leave(self.me)

    # -- the store ----------------------------------------------------------------------------

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Set a key at every member of a generation."""
        with self._lock:
            self._keys.setdefault(generation, {})[key] = value
            if self._own_puts and self._own_puts[0].generation < generation:
                self._own_puts.clear()
            self._own_puts.append(Put(generation, key, value))
            self._send_members(generation, Put(generation, key, value))
            self._changed.notify_all()

    def get(self, generation: int, keys: Iterable[str], timeout: float) -> list[bytes]:
        """Wait until all keys are there.

        Raises:
            TimeoutError: they were not within ``timeout`` seconds.
            WireError: the generation is over.
        """
        wanted = list(keys)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                own = self._keys.setdefault(generation, {})
                missing = [key for key in wanted if key not in own]
                if not missing:
                    return [own[key] for key in wanted]
                self._still(generation)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"key {missing[0]!r} was not set within {timeout:g} s")
                self._changed.wait(left)

    def known(self, generation: int) -> dict[str, bytes]:
        """All keys of a generation that are here now."""
        with self._lock:
            return dict(self._keys.get(generation, {}))

    def change(self, change: Change, timeout: float) -> bytes:
        """Change a key at its home; the value that came of it.

        Raises:
            TimeoutError, WireError: as in `get`.
        """
        with self._changed:
            self._numbers += 1
            number = self._numbers
            change = msgspec.structs.replace(change, number=number)
            view = self._view
            if view is None or view.generation != change.generation:
                raise WireError("the generation is over")
            home = view.members[zlib.crc32(change.key.encode()) % view.size].peer.id
            if home == self.me.id:
                return self._change(change)
            link = self._links.get(home)
            if link is None:
                raise WireError("the generation is over")
            self._send(link, change)
            deadline = time.monotonic() + timeout
            while number not in self._answers:
                self._still(change.generation)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"key {change.key!r}: no answer within {timeout:g} s")
                self._changed.wait(left)
            return self._answers.pop(number)

    def _still(self, generation: int) -> None:
        view = self._view
        if view is None or view.generation != generation or self._end is not None:
            reason = self._end.reason if self._end else "a newer one was formed"
            raise WireError(f"the generation is over: {reason}")

    def _change(self, change: Change) -> bytes:
        own = self._keys.setdefault(change.generation, {})
        old = own.get(change.key)
        if change.desired is not None:
            value = old if old is not None else b""
            if (old is None and not change.expected) or old == change.expected:
                value = change.desired
        elif change.append is not None:
            value = (old or b"") + change.append
        else:
            value = str(int(old or b"0") + change.add).encode()
        if value != old:
            self.put(change.generation, change.key, value)
        return value

    # -- the thread ---------------------------------------------------------------------------

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            log.exception("the mesh failed")
            with self._changed:
                self._evicted = f"its mesh failed: {error!r}"
                self._changed.notify_all()
            self._on_evict(self._evicted)
        finally:
            with self._changed:
                self._closing = True
                for link in (*self._links.values(), *self._raw):
                    with contextlib.suppress(WireError):
                        link.flush()
                    link.close()
                self._links.clear()
                self._listener.close()
                self._selector.close()
                os.close(self._wake)
                self._changed.notify_all()

    def _turn(self) -> None:
        for key, events in self._selector.select(self._patience()):
            with self._lock:
                key.data(events)
        now = time.monotonic()
        end = None
        with self._lock:
            self._tend(now)
            self._consider(now)
            if self._end and self.status.phase == "running" and now - self._last_cut >= AGAIN:
                self._last_cut, end = now, self._end
        # Without the lock: it may take a while, and the main thread may hold it.
        if end:
            self._on_end(end)

    def _patience(self) -> float:
        due = [self._next_beat]
        if self._end and self.status.phase == "running":
            due.append(self._last_cut + AGAIN)
        if self._look_again is not None:
            due.append(self._look_again)
        due += self._redial.values()
        return max(0.0, min(due) - time.monotonic())

    def _tend(self, now: float) -> None:
        """What time brings: beats, silence, handshakes that take too long, addresses to retry."""
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self._broadcast(self._on_tick(now) or Beat(self.status.step))
            for link in self._usable():
                self._judge_silence(link, now)
            if now - self._adopted_at > REACH_SECONDS and (missing := self._unreached()):
                text = f"{missing[0].node} cannot be reached from {self.me.node}"
                self._over(Break(self._current(), text, missing[0].id, "lost"))
            for link in [raw for raw in self._raw if now - raw.born > HANDSHAKE_SECONDS]:
                self._drop(link)
        for address in [a for a, when in self._redial.items() if when <= now]:
            del self._redial[address]
            self._dial("", *address)

    def _judge_silence(self, link: Link, now: float) -> None:
        if link.peer and now - link.heard > self._silence and self._in_view(link.peer.id):
            text = (
                f"rank on seat {link.peer.seat} ({link.peer.node}) silent for {self._silence:g} s"
            )
            self._over(Break(self._current(), text, link.peer.id, "hang"))

    def _accept(self, _: int) -> None:
        while True:
            try:
                sock, _address = self._listener.accept()
            except OSError:
                return
            link = Link(sock, self._secret, dialed=False)
            self._raw.add(link)
            self._watch(link)
            self._try(link, link.challenge)

    def _watch(self, link: Link, events: int = selectors.EVENT_READ) -> None:
        self._selector.register(link, events, lambda e, link=link: self._event(link, e))

    def _event(self, link: Link, events: int) -> None:
        if link.fileno() < 0:
            return
        if events & selectors.EVENT_WRITE:
            if link.dialed and not link.proven:
                code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    self._drop(link)
                    return
            if link.wants_to_write:
                self._try(link, link.flush)
            self._interest(link)
        if events & selectors.EVENT_READ and link.fileno() >= 0:
            self._try(link, lambda: self._read(link))

    def _interest(self, link: Link) -> None:
        if link.fileno() < 0:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
        with contextlib.suppress(KeyError):
            if self._selector.get_key(link).events != events:
                data = self._selector.get_key(link).data
                self._selector.modify(link, events, data)

    def _try(self, link: Link, act: Callable[[], None]) -> None:
        try:
            act()
        except AuthError as error:
            log.warning("a connection was refused: %s", error)
            self._drop(link)
        except WireError as error:
            self._gone(link, str(error))

    def _read(self, link: Link) -> None:
        for message in link.receive():
            if link.proven:
                self._hear(link, message)
            elif link.handshake(message, self.me, self.status, self._roster):
                self._proven(link)
        self._interest(link)

    # -- peers --------------------------------------------------------------------------------

    def _dial_known(self) -> None:
        # Starting behind oneself, so that two newcomers seldom dial each other at the same time.
        known = sorted(self._meeting.others())
        own = (self.me.id, self.me.host, self.me.port)
        for name, host, port in [k for k in known if k > own] + [k for k in known if k < own]:
            self._dial(name, host, port)

    def _dial(self, name: str, host: str, port: int) -> None:
        if name == self.me.id or (host, port) == (self.me.host, self.me.port):
            return
        if name in self._links or any(raw.expected == name != "" for raw in self._raw):
            return
        if not name and any(
            link.peer and (link.peer.host, link.peer.port) == (host, port)
            for link in self._links.values()
        ):
            return
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
            link = Link(sock, self._secret, dialed=True)
            link.expected = name
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
        except OSError as error:
            log.debug("%s:%s: %s", host, port, error)
            if not name:
                self._redial[(host, port)] = time.monotonic() + REDIAL
            return
        link.address = (host, port)
        self._raw.add(link)
        self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _roster(self) -> tuple[Peer, ...]:
        return tuple(link.peer for link in self._links.values() if link.peer)

    def _proven(self, link: Link) -> None:
        self._raw.discard(link)
        peer = link.peer
        assert peer is not None
        if peer.id == self.me.id:
            self._drop(link)
            return
        known = self._links.get(peer.id)
        if known is not None:
            # Both dialed at once. The connection of the lower id stays, and its dialer, who sees
            # it proven last, closes the other one: so nobody takes that for a death.
            keep_new = link.dialed == (self.me.id < peer.id)
            new, old = (link, known) if keep_new else (known, link)
            self._links[peer.id] = new
            old.superseded = True
            if self.me.id < peer.id:
                self._drop(old)
        else:
            self._links[peer.id] = link
        for other in link.roster:
            if other.id not in self._links:
                self._dial(other.id, other.host, other.port)
        if known is None and self._in_view(peer.id):
            for put in self._own_puts:
                if put.generation == self._current():
                    self._send(link, put)
        self._same_seat(peer)
        self.knock.set()
        self._changed.notify_all()

    def _same_seat(self, peer: Peer) -> None:
        """A newer process took a seat: whoever sat there is dead, or must go."""
        if peer.seat < 0:
            return
        if peer.seat == self.me.seat and peer.id != self.me.id:
            if (peer.incarnation, peer.id) > (self.me.incarnation, self.me.id):
                self._evict_me(f"a newer process took seat {peer.seat}")
            return
        for other in list(self._links.values()):
            if other.peer and other.peer.id != peer.id and other.peer.seat == peer.seat:
                older = min((other.peer, peer), key=lambda p: (p.incarnation, p.id))
                self._give_up(older.id, f"a newer process took seat {peer.seat}", dead=True)
        if self._worked:
            for member in self._worked.members:
                if member.peer.seat == peer.seat and member.peer.incarnation < peer.incarnation:
                    self._lost[member.peer.id] = True

    def _drop(self, link: Link) -> None:
        """Close a connection that means nothing."""
        self._raw.discard(link)
        if link.fileno() >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link)
            link.close()
        address = link.address
        if address and not link.expected and not link.proven and not self._closing:
            self._redial[address] = time.monotonic() + REDIAL

    def _gone(self, link: Link, why: str) -> None:
        self._drop(link)
        peer = link.peer
        if peer is None or link.superseded or self._links.get(peer.id) is not link:
            return
        del self._links[peer.id]
        if link.status.phase == "done" and self.status.phase == "done":
            self._changed.notify_all()
            return
        closed = "timed out" not in why and "unreachable" not in why.lower()
        self._lose(peer, why, dead=closed)

    def _lose(self, peer: Peer, why: str, dead: bool) -> None:
        self._lost[peer.id] = self._lost.get(peer.id, False) or dead
        if peer.seat >= 0 and self._in_view(peer.id):
            text = f"rank on seat {peer.seat} ({peer.node}) is gone: {why}"
            self._over(Break(self._current(), text, peer.id, "lost"))
        self._changed.notify_all()

    def _give_up(self, name: str, reason: str, dead: bool) -> None:
        """Go on without a peer that is still connected."""
        link = self._links.get(name)
        if link is None or link.peer is None:
            return
        with contextlib.suppress(WireError):
            link.send(messages.pack(Evict(reason)))
        log.warning("seat %d (%s) is given up: %s", link.peer.seat, link.peer.node, reason)
        self._drop(link)
        del self._links[name]
        # No cable can be cut between two processes of one machine.
        self._lose(link.peer, reason, dead or link.peer.node == self.me.node)
        self._on_given_up(link.peer, reason)

    def _evict_me(self, reason: str) -> None:
        if self._evicted:
            return
        self._evicted = reason
        self._over(Break(self._current(), reason, self.me.id, "stop"))
        self._changed.notify_all()
        threading.Thread(target=self._on_evict, args=(reason,), daemon=True).start()

    def _usable(self) -> list[Link]:
        return [link for link in self._links.values() if link.peer and link.peer.seat >= 0]

    # -- messages -----------------------------------------------------------------------------

    def _send(self, link: Link, message: Message) -> None:
        try:
            link.send(messages.pack(message))
        except WireError as error:
            self._gone(link, str(error))
            return
        if link.wants_to_write:
            self._interest(link)
            self._ring()

    def _broadcast(self, message: Message) -> None:
        frame = messages.pack(message)
        for link in list(self._links.values()):
            try:
                link.send(frame)
            except WireError as error:
                self._gone(link, str(error))
                continue
            if link.wants_to_write:
                self._interest(link)
                self._ring()

    def _send_members(self, generation: int, message: Message) -> None:
        view = self._view
        if view is None or view.generation != generation:
            return
        frame = messages.pack(message)
        for member in view.members:
            link = self._links.get(member.peer.id)
            if link is not None:
                try:
                    link.send(frame)
                except WireError as error:
                    self._gone(link, str(error))
                    continue
                if link.wants_to_write:
                    self._interest(link)
                    self._ring()

    def _hear(self, link: Link, message: Message) -> None:
        match message:
            case Say(number=number, status=status):
                if number > link.said:
                    link.said, link.status = number, status
                    if status.phase == "ready":
                        self.knock.set()
                    self._changed.notify_all()
            case Beat():
                link.beat = message
            case Put(generation=generation, key=key, value=value):
                if generation >= self._current():
                    self._keys.setdefault(generation, {})[key] = value
                    self._changed.notify_all()
            case Change():
                value = self._change(message)
                self._send(link, Changed(message.generation, message.number, value))
            case Changed(number=number, value=value):
                self._answers[number] = value
                self._changed.notify_all()
            case Form(view=view):
                self._adopt(view)
            case Over(end=end):
                if end.kind == "stop":
                    self._stopped = end
                    self._changed.notify_all()
                self._over(end)
            case Finding():
                self._find(message)
            case Evict(reason=reason):
                self._evict_me(reason)
            case Bye(reason=reason):
                log.debug("a peer leaves: %s", reason)
                if link.status.phase == "done":
                    # It leaves only when it knows that everybody is done.
                    self._finished = True
                    self._changed.notify_all()
            case _:
                raise WireError("it speaks out of turn")

    def _find(self, finding: Finding) -> None:
        known = self._bad_nodes.get(finding.node)
        if known is not None and (known.dead or not finding.dead):
            return
        self._bad_nodes[finding.node] = finding
        self._broadcast(finding)
        if self.me.node == finding.node:
            # This node must be left, or was given up as dead while it was only cut off.
            self._evict_me(f"{finding.node} must be left: {finding.reason}")
            return
        for link in self._usable():
            if link.peer and link.peer.node == finding.node:
                self._give_up(link.peer.id, finding.reason, dead=True)
        for member in self._worked.members if self._worked else ():
            if member.peer.node == finding.node:
                self._lost[member.peer.id] = True
        self._changed.notify_all()

    # -- generations --------------------------------------------------------------------------

    def _current(self) -> int:
        return self._view.generation if self._view else 0

    def _in_view(self, name: str) -> bool:
        return self._view is not None and self._view.rank_of(name) >= 0

    def _over(self, end: Break) -> None:
        if self._view is None or end.generation != self._view.generation or self._end is not None:
            return
        self._end, self._ended_at = end, time.monotonic()
        if end.kind == "lost" and end.culprit in self._links:
            self._strikes[end.culprit] = self._strikes.get(end.culprit, 0) + 1
        log.info("generation %d is over: %s", self._view.counter, end.reason)
        self._broadcast(Over(end))
        self._changed.notify_all()

    def _adopt(self, view: View) -> None:
        if view.generation <= self._highest:
            return
        self._highest = view.generation
        if view.rank_of(self.me.id) < 0:
            return
        if self._view is not None and self._end is None:
            self._over(Break(self._view.generation, "a newer generation was formed"))
        for generation in [g for g in self._keys if g < view.generation]:
            del self._keys[generation]
        self._view, self._end, self._waits_for = view, None, ""
        self._adopted_at = time.monotonic()
        for peer in self._unreached():
            # Two that came at the same time may still be shaking hands.
            self._dial(peer.id, peer.host, peer.port)
        self._changed.notify_all()

    def _unreached(self) -> list[Peer]:
        if self._view is None or self._end is not None:
            return []
        members = (member.peer for member in self._view.members)
        return [peer for peer in members if peer.id not in self._links and peer.id != self.me.id]

    def _present(self) -> list[Member]:
        return [
            Member(self.me, self.status),
            *(Member(link.peer, link.status) for link in self._usable() if link.peer),
        ]

    def _all_done(self) -> bool:
        """Is everybody done who would be in the next generation? Spares do not count."""
        present = self._present()
        if self.status.phase == "running" or not any(m.status.phase == "done" for m in present):
            return False
        chosen = layout.arrange(layout.one_a_seat(present), self._rules.replica_size)
        return bool(chosen) and all(member.status.phase == "done" for member in chosen)

    def _consider(self, now: float) -> None:
        """Propose the next generation, if it is time and this is the lowest seat."""
        self._look_again = None
        if self._evicted or self._finished or self.me.seat < 0:
            return
        view = self._view
        going_on = view is not None and self._end is None
        if going_on and self.status.generation < self._current():
            return  # being formed
        present = self._present()
        busy = [m for m in present if m.status.phase == "running"]
        if going_on and any(m.status.generation == self._current() for m in busy):
            return
        if any(m.status.generation > self._current() for m in busy):
            return  # a living world that this process is not in: it is asked in at a boundary
        if busy:
            self._hurry(busy, now)
            if any(m.peer.id == self.me.id or m.peer.id in self._links for m in busy):
                return
            present = self._present()
        if self._all_done():
            # Kept: the first to hear of it leave at once, and would be missed otherwise.
            self._finished = True
            self._changed.notify_all()
            return
        if self.me.seat > min(m.peer.seat for m in present):
            return
        for name in [name for name, strikes in self._strikes.items() if strikes >= STRIKES]:
            del self._strikes[name]
            self._give_up(name, "other ranks cannot reach it", dead=False)
            return
        proposal = layout.propose(
            present, self._lost, self._worked, self._rules, now - self._since, bool(self._worked)
        )
        if proposal.members is None:
            if proposal.reason != self._waits_for:
                log.debug("%s", proposal.reason)
            self._waits_for = proposal.reason
            if proposal.again is not None:
                self._look_again = now + proposal.again
            return
        if not any(m.peer.id == self.me.id for m in proposal.members):
            return
        highest = max(self._highest, *(m.status.generation for m in present))
        generation = generation_number(counter_of(highest) + 1, self.me.seat)
        size = self._rules.replica_size
        new = View(generation, proposal.members, size, self._rules.seats, proposal.reason)
        frame = messages.pack(Form(new))
        for member in new.members:
            link = self._links.get(member.peer.id)
            if link is not None:
                with contextlib.suppress(WireError):
                    link.send(frame)
                self._interest(link)
        self._adopt(new)

    def _hurry(self, busy: list[Member], now: float) -> None:
        """Give up who does not leave the block of a generation that is over."""
        for member in busy:
            if member.peer.id == self.me.id:
                self._look_again = now + AGAIN
                continue
            link = self._links.get(member.peer.id)
            if link is None:
                continue
            late = now - max(self._ended_at, self._since)
            silent = now - link.heard
            if silent > SHORT_SILENCE and late > 0:
                self._give_up(member.peer.id, f"silent for {silent:.1f} s", dead=False)
            elif self._ended_at and late > self._abort_timeout:
                text = f"it did not leave its block within {self._abort_timeout:g} s"
                self._give_up(member.peer.id, text, dead=True)
            else:
                self._look_again = now + 0.05
