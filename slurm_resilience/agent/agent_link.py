"""The one connection to sresctld: beats on time, reports at once, reconnects for ever."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import random
import select
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.agent.responder import Answerer, Responder
from slurm_resilience.clock import Clock
from slurm_resilience.errors import SresError, WireError
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    Goodbye,
    NodeAnswer,
    NodeHello,
    NodeRequest,
    Refused,
)

log = logging.getLogger("sresd.link")

FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 5.0
"""Between two attempts. Quick, because sresctld takes a missing beat for a missing node;
capped, because 10,000 nodes knock after a restart of sresctld."""
TOLD_SECONDS = (0.05, 0.12)
"""From a message to two early beats: should sresctld have taken it for a beat, which may rest
unread, it reads both with the first; with the second, if a busy turn took these two for one."""
SETTLED_SECONDS = 5.0
"""A connection that lived this long was a good one: the next backoff starts small again."""


def next_due(due: float, period: float, now: float) -> float:
    """Return when the next beat is due. Late beats are dropped, never sent in a burst."""
    following = due + period
    return following if following > now else now + period


def backoff(attempt: int, chance: float) -> float:
    """Return the seconds before attempt number ``attempt`` (from 0); ``chance`` is in [0, 1)."""
    ceiling: float = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(attempt, 10))
    return ceiling * (0.5 + 0.5 * chance)


class Wakeup:
    """A bell for a thread that waits in select(); any thread can ring it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class LinkState(NamedTuple):
    """The facts that the isolation watch needs, replaced as a whole."""

    connected: bool = False
    peers: tuple[str, ...] = ()
    """`address:port` of other nodes, from the last welcome."""
    sessions: int = 0


class AgentLink:
    """Keeps one session with sresctld going until `stop` is set."""

    def __init__(
        self,
        dial: Callable[[], Connection],
        hello: NodeHello,
        outbox: Outbox,
        wakeup: Wakeup,
        beat: float,
        clock: Clock,
        stop: threading.Event,
        answerers: Mapping[str, Answerer],
    ) -> None:
        self._dial = dial
        self._responder = Responder(answerers, self._answer)
        self._answers: queue.SimpleQueue[tuple[int, NodeAnswer]] = queue.SimpleQueue()
        """With the session that asked; at most one of each kind of question."""
        self._hello = hello
        self._outbox = outbox
        self._wakeup = wakeup
        self._beat = beat
        self._clock = clock
        self._stop = stop
        self.state = LinkState()

    def run(self) -> None:
        """Run the thread."""
        attempt, last_error = 0, ""
        while not self._stop.is_set():
            try:
                with self._dial() as connection:
                    log.info("connected to sresctld")
                    last_error, began = "", self._clock.monotonic()
                    try:
                        self._session(connection)
                    finally:
                        self.state = self.state._replace(connected=False)
                        if self._clock.monotonic() - began > SETTLED_SECONDS:
                            attempt = 0
            except SresError as error:
                # Each trouble once: the same line every five seconds helps no reader.
                log.log(logging.DEBUG if str(error) == last_error else logging.WARNING, "%s", error)
                last_error = str(error)
            if self._clock.wait(self._stop, backoff(attempt, random.random())):
                return
            attempt += 1

    def _session(self, connection: Connection) -> None:
        connection.send(self._hello)
        connection.send(self._outbox.take_all())
        peers = connection.welcome.peers
        self.state = LinkState(True, peers, self.state.sessions + 1)
        seq, due = 0, self._clock.monotonic()
        early: list[float] = []
        while not self._stop.is_set():
            now = self._clock.monotonic()
            if now >= min(due, *early, math.inf):
                connection.beat(seq)
                early = [moment for moment in early if moment > now]
                seq, due = seq + 1, next_due(due if now >= due else now, self._beat, now)
            fds = [connection.fileno(), self._wakeup.fileno()]
            wait = max(0.0, min(due, *early, math.inf) - now)
            ready, _, _ = select.select(fds, [], [], wait)
            if fds[1] in ready:
                self._wakeup.clear()
                # An answer may stand for results that were put up before it: they go first.
                answers = self._take_answers()
                report = self._outbox.take()
                if report is not None:
                    connection.send(report)
                for answer in answers:
                    connection.send(answer)
                if report is not None or answers:
                    early = [self._clock.monotonic() + seconds for seconds in TOLD_SECONDS]
            if fds[0] in ready:
                self._listen(connection)
        with contextlib.suppress(WireError):
            connection.send(Goodbye("sresd stops"))

    def _listen(self, connection: Connection) -> None:
        """Read what sresctld sends, so that it never fills the buffer; pass a refusal on."""
        while (message := connection.receive(0.0)) is not None:
            if isinstance(message, Refused):
                raise WireError(f"sresctld refused: {message.reason}")
            if isinstance(message, NodeRequest):
                self._responder.take(self.state.sessions, message)
            else:
                log.debug("sresctld sent %s", type(message).__name__)

    def _answer(self, session: int, answer: NodeAnswer) -> None:
        """Queue an answer, in any thread."""
        self._answers.put((session, answer))
        self._wakeup.ring()

    def _take_answers(self) -> list[NodeAnswer]:
        answers: list[NodeAnswer] = []
        with contextlib.suppress(queue.Empty):
            while True:
                session, answer = self._answers.get_nowait()
                if session == self.state.sessions:  # else the asker is gone
                    answers.append(answer)
        return answers
