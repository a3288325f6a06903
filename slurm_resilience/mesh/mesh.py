"""The mesh: one thread that keeps a connection to every other process of the training.

A closed connection is a dead process, and everybody knows it within a millisecond. Status, breaks,
generations and the store's keys travel over the same connections, in order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from slurm_resilience.errors import WireError
from slurm_resilience.mesh import world_plan
from slurm_resilience.mesh.connection import HANDSHAKE_SECONDS, PeerConnection
from slurm_resilience.mesh.core import BEAT, SILENCE, log
from slurm_resilience.mesh.generations import AGAIN
from slurm_resilience.mesh.keys import Keys
from slurm_resilience.mesh.messages import (
    Evict,
    GenerationEnded,
    Heartbeat,
    KeyChange,
    KeyChanged,
    KeyPut,
    Leaving,
    Message,
    NewGeneration,
    NodeLost,
    Roster,
    StatusUpdate,
)
from slurm_resilience.mesh.model import GenerationEnd, Member, Peer, PeerStatus, View

__all__ = ["BEAT", "SILENCE", "Mesh", "Stopped"]

T = TypeVar("T")

REACH_SECONDS = 3.0
"""Within this time every member of a new generation must have reached every other."""
KNOWN_AGAIN = 3.0
"""Who has waited for a world for so many seconds dials all that are known, again and again: a world
is formed much sooner than that."""
TELL_SECONDS = 2.0
"""A process that was held up for longer says so."""
OUTCOME_SECONDS = 1.0
"""Seconds between two looks whether the training is over, for a process that found nobody."""


class Stopped(Exception):
    """The training was given up by one of its processes."""


class Mesh(Keys):
    """This process among the others. Its methods may be called from any thread."""

    def start(self) -> Mesh:
        """Start its thread; the others can see this process from now on."""
        self._meeting.enter(self.me)
        self._dial_known()
        self._thread.start()
        return self

    @property
    def end(self) -> GenerationEnd | None:
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

    def say(self, status: PeerStatus) -> None:
        """Tell everybody."""
        with self._lock:
            if status.phase != "running" and self.status.phase == "running":
                self._since = time.monotonic()
            if self._view is not None and self._end is not None:
                # A generation that was never entered counts too: whoever leads next must know its
                # number, or it would make one that this process has seen the end of.
                newest = max(status.generation, self._view.generation)
                status = msgspec.structs.replace(status, generation=newest)
            self.status = status
            self._said += 1
            self._broadcast(StatusUpdate(self._said, status))
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
                if self._closing:
                    raise WireError("the mesh is closed")
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
            self._changed.wait_for(lambda: self._end is not None, seconds)

    def hear_out(
        self, view: View, enough: Callable[[list[PeerStatus]], T | None], seconds: float
    ) -> T | None:
        """Wait until what the other living members of a generation say is enough.

        Args:
            view: the generation.
            enough: what follows from their statuses; None: not enough yet. Called with the lock.
            seconds: to wait at most.

        Returns:
            What follows; None: not enough in time.
        """
        deadline = time.monotonic() + seconds
        inside = {member.peer.id for member in view.members}
        with self._changed:
            while True:
                found = enough(
                    [link.status for name, link in self._links.items() if name in inside]
                )
                left = deadline - time.monotonic()
                if found is not None or left <= 0 or self._closing or self._evicted:
                    return found
                self._changed.wait(left)

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

    def stop(self, end: GenerationEnd) -> None:
        """End the training for everybody, whatever generation they are in."""
        with self._lock:
            self._broadcast(GenerationEnded(end))
        self._ring()

    def worked(self, view: View) -> None:
        """Every member of this generation could talk to every other: it counts from now on."""
        with self._lock:
            self._worked = view
            here = {member.peer.id for member in view.members}
            self._lost = {name: dead for name, dead in self._lost.items() if name in here}

    def over(self, end: GenerationEnd) -> None:
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
            after = world_plan.arrange(world_plan.one_a_seat([*ours, *waiting]), size)
            if len(after) <= self._view.size:
                return ()
            return tuple(member.peer for member in waiting)

    def beats(self) -> dict[str, tuple[Peer, Heartbeat, float]]:
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
            self._broadcast(Leaving(reason))
        self._ring()
        self._thread.join(2.0)
        self._meeting.leave(self.me)

    def _run(self) -> None:
        try:
            self._turned = time.monotonic()
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
        patience = self._patience()
        for key, events in self._selector.select(patience):
            with self._lock:
                key.data(events)
        now = time.monotonic()
        late, self._turned = now - self._turned - patience, now
        end = None
        with self._lock:
            if late > self.beat:
                self._held_up(late, now)
            self._tend(now)
            self._consider(now)
            if self._end and self.status.phase == "running" and now - self._last_cut >= AGAIN:
                self._last_cut, end = now, self._end
        # Without the lock: it may take a while, and the main thread may hold it.
        if end:
            self._on_end(end)

    def _held_up(self, late: float, now: float) -> None:
        """Who did not look does not judge: time in which this thread did not run, because the
        machine was stopped or overloaded or another thread held the interpreter, is no silence of
        the others, who may have shared it."""
        for link in self._links.values():
            link.heard = min(now, link.heard + late)
        self._ended_at += late if self._ended_at else 0.0
        self._adopted_at += late
        log.log(
            logging.WARNING if late > TELL_SECONDS else logging.DEBUG,
            "this process was held up for %.1f s; peers are not judged by that time",
            late,
        )

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
            self._next_beat = now + self.beat
            self._broadcast(self._on_tick(now) or Heartbeat(self.status.step))
            for link in self._usable():
                self._judge_silence(link, now)
            if now - self._adopted_at > REACH_SECONDS and (missing := self._unreached()):
                text = f"{missing[0].node} cannot be reached from {self.me.node}"
                # Who misses most of the others is the one that is cut off.
                size = self._view.size if self._view else 0
                own = len(missing) > 1 and 2 * len(missing) >= size - 1
                self._over(
                    GenerationEnd(
                        self._current(), text, self.me.id if own else missing[0].id, "lost"
                    )
                )
            old = [raw for raw in self._raw if now - raw.born > HANDSHAKE_SECONDS]
            for link in old:
                if not link.proven or link.finishing:
                    self._drop(link)
            waits = self.status.phase == "ready" and now - self._since > KNOWN_AGAIN
            if waits and now >= self._dial_again:
                # Who was stopped for a while answers again, and nobody else would dial it.
                self._dial_again = now + KNOWN_AGAIN
                self._dial_known()
            if self._deaf:
                self._deaf = False
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for address in [a for a, when in self._redial.items() if when <= now]:
            del self._redial[address]
            self._dial(*address)

    def _hear(self, link: PeerConnection, message: Message) -> None:
        match message:
            case StatusUpdate(number=number, status=status):
                if link.superseded and link.peer:
                    link = self._links.get(link.peer.id, link)
                if number > link.said:
                    link.said, link.status = number, status
                    if status.phase == "ready":
                        self.knock.set()
                    self._changed.notify_all()
            case Heartbeat():
                link.beat = message
            case Roster(peers=peers):
                for peer in peers:
                    if peer.id not in self._links:
                        self._dial(peer.id, peer.host, peer.port)
            case KeyPut(generation=generation, key=key, value=value):
                if generation >= self._current():
                    self._set(generation, key, value)
            case KeyChange():
                value = self._change(message)
                self._send(link, KeyChanged(message.generation, message.number, value))
            case KeyChanged(number=number, value=value):
                self._answers[number] = value
                self._changed.notify_all()
            case NewGeneration(view=view):
                self._adopt(view)
            case GenerationEnded(end=end):
                if end.kind == "stop":
                    self._stopped = end
                    self._changed.notify_all()
                self._over(end)
            case NodeLost():
                self._find(message)
            case Evict(reason=reason):
                self._evict_me(reason)
            case Leaving(reason=reason):
                log.debug("a peer leaves: %s", reason)
                if link.status.phase == "done":
                    # It leaves only when it knows that everybody is done.
                    self._finished = True
                    self._changed.notify_all()
            case _:
                raise WireError("it speaks out of turn")
