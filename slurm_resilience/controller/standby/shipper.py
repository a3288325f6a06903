"""The side of the connection that has the newer journal: it ships records to a standby.

One message is under way at a time: the next one leaves when the last one was acknowledged. All that
has come about meanwhile goes in one.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slurm_resilience.clock import Clock
from slurm_resilience.controller.journal.journal_file import open_database
from slurm_resilience.controller.standby.pair_states import ACK_SECONDS, Pairing, PairState
from slurm_resilience.controller.standby.recorded_connection import history_of, position_of
from slurm_resilience.errors import SresError, WireError
from slurm_resilience.wire.messages import (
    JournalAck,
    JournalCopy,
    JournalHead,
    JournalRecord,
    JournalRecords,
    Message,
    StandbyHello,
)

log = logging.getLogger("sresctld.standby")

PART_BYTES = 1 << 20
KEPT_RECORDS = 20_000
"""A standby that lacks no more than these is not sent the whole journal."""
RECORDS_AT_ONCE = 200
SIGN_OF_LIFE_SECONDS = 1.0
COPY_SECONDS = 60.0
"""A standby may take so long for one part of a copy."""
LOOK_SECONDS = 0.25
BEGIN_SECONDS = 15.0
"""An act waits for so long for the standby's word, or for the marker."""


class StandbyPeer(Protocol):
    """A connection to a standby."""

    @property
    def subject(self) -> str: ...
    def send(self, message: Message) -> None: ...
    def close(self) -> None: ...


class MarkerWriter(Protocol):
    """Writes who is active, and which standby has everything."""

    def __call__(self, history: str, standby: str) -> None: ...


def copy_of(path: Path | str) -> tuple[str, int, bytes]:
    """Return a journal's history, its position, and its content at that position.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    db = open_database(path)
    try:
        db.execute("BEGIN")
        history, position = history_of(db), position_of(db)
        return history, position, bytes(db.serialize())
    finally:
        db.close()


def parts_of(history: str, position: int, content: bytes) -> deque[Message]:
    """Return a copy of a journal as messages."""
    return deque(
        JournalCopy(
            history,
            position,
            content[at : at + PART_BYTES],
            max(0, len(content) - at - PART_BYTES),
        )
        for at in range(0, len(content), PART_BYTES)
    )


class _Course:
    """The messages to the connected standby."""

    def __init__(self) -> None:
        self.peer: StandbyPeer | None = None
        self.parts: deque[Message] = deque()
        """The rest of a copy of the journal, which goes before all records."""
        self.sent = 0
        """The last record that was sent."""
        self.is_sending = False
        """A message is under way, and was not acknowledged yet."""
        self.sent_at = 0.0
        self.is_copying = False
        """The copy is on its way: its last part takes the standby's disk a while."""


class Shipper:
    """Ships the active sresctld's journal, and holds acts back until the standby has their record.

    `committed` and `begin_act` are the cycle's; `attach`, `acknowledged` and `detach` are the
    wire's; the rest is done in a thread of its own.
    """

    def __init__(
        self,
        host: str,
        history: str,
        journal: Path,
        position: int,
        write_marker: MarkerWriter,
        clock: Clock,
    ) -> None:
        """
        Args:
            host: this machine.
            history: of the journal.
            journal: its file.
            position: its last record.
            write_marker: writes the marker, which says now that we are alone.
            clock: its monotonic time counts.
        """
        self._host = host
        self._history = history
        self._journal = journal
        self._write_marker = write_marker
        self._clock = clock
        self._pairing = Pairing(position)
        self._kept: deque[JournalRecord] = deque(maxlen=KEPT_RECORDS)
        self._changed = threading.Condition()
        self._arriving: tuple[StandbyPeer, StandbyHello] | None = None
        self._course = _Course()
        self._trouble = ""
        self._changed_at = clock.monotonic()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End: what is not sent is not sent any more."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    # -- the cycle ----------------------------------------------------------------------------

    def committed(self, record: JournalRecord) -> None:
        """Take in a record that our journal has."""
        with self._changed:
            self._kept.append(record)
            self._pairing.commit(record.number)
            self._changed.notify_all()

    def begin_act(self) -> None:
        """Wait until an act may be begun that stands in the last record.

        Raises:
            SresError: neither a standby has the record, nor does the marker say that we are alone.
        """
        deadline = self._clock.monotonic() + BEGIN_SECONDS
        with self._changed:
            number = self._pairing.committed
            while not self.may_begin(number):
                left = deadline - self._clock.monotonic()
                if left <= 0 or self._stop:
                    raise SresError(
                        f"the standby {self._pairing.standby} has not acknowledged it"
                        f"{f' ({self._trouble})' if self._trouble else ''}: it is not begun"
                    )
                self._changed.wait(min(left, LOOK_SECONDS))

    def may_begin(self, number: int) -> bool:
        """Tell whether an act may be begun that stands in this record."""
        with self._changed:
            return self._pairing.may_begin(number)

    def facts(self) -> tuple[str, PairState, float]:
        """Return the standby's name (empty: none has connected), the state, and for how many
        seconds it has been so."""
        with self._changed:
            seconds = self._clock.monotonic() - self._changed_at
            return self._pairing.standby, self._pairing.state, seconds

    # -- the wire -----------------------------------------------------------------------------

    def attach(self, peer: StandbyPeer, hello: StandbyHello) -> None:
        """Take in a standby's first message."""
        with self._changed:
            self._arriving = (peer, hello)
            self._changed.notify_all()

    def acknowledged(self, peer: StandbyPeer, ack: JournalAck) -> None:
        with self._changed:
            if peer is not self._course.peer:
                return
            self._course.is_sending = False
            # Parts of a copy are acknowledged with a position that is not there yet.
            if not self._course.parts:
                self._course.is_copying = False
                self._pairing.acknowledge(ack.position, self._clock.monotonic())
            self._pairing.heard_at = self._clock.monotonic()
            self._changed.notify_all()

    def detach(self, peer: StandbyPeer) -> None:
        with self._changed:
            if peer is self._course.peer:
                self._drop("the connection is lost")

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            try:
                self.turn()
            except Exception as error:  # a thread that ends is silent for good
                log.exception("the journal could not be sent to the standby")
                with self._changed:
                    self._trouble = str(error)
                    self._drop(str(error))
            with self._changed:
                if not self._stop and not self._is_due():
                    self._changed.wait(LOOK_SECONDS)

    def turn(self) -> None:
        """Do what is due, each at most once."""
        with self._changed:
            seconds = COPY_SECONDS if self._course.is_copying else ACK_SECONDS
            if self._pairing.is_overdue(self._clock.monotonic(), seconds):
                self._drop("it does not acknowledge")
            state, standby = self._pairing.state, self._pairing.standby
            if self._pairing.is_level:
                self._pairing.begin_naming()
                state = self._pairing.state
        if state is PairState.LOST:
            self._mark("", self._pairing.marked_alone)
        elif state is PairState.NAMING:
            self._mark(standby, self._pairing.named)
        self._welcome()
        self._send()

    def _is_due(self) -> bool:
        pairing = self._pairing
        is_waited_for = pairing.is_connected and not self._course.is_sending
        has_more = bool(self._course.parts) or self._course.sent < pairing.committed
        return (
            (self._arriving is not None and not self._trouble)
            or pairing.is_level
            or (is_waited_for and has_more)
            or (pairing.state in (PairState.LOST, PairState.NAMING) and not self._trouble)
        )

    def _mark(self, standby: str, then: Callable[[], None]) -> None:
        try:
            self._write_marker(self._history, standby)
        except SresError as error:
            with self._changed:
                if not self._trouble:
                    log.error("%s", error)
                self._trouble = str(error)
            return
        with self._changed:
            self._trouble = ""
            then()
            self._changed_at = self._clock.monotonic()
            self._changed.notify_all()
        if standby:
            log.info("the standby %s has the journal", standby)
        else:
            log.warning("no standby has the journal from now on")

    def _drop(self, why: str) -> None:
        """Give the standby up. Called with the lock."""
        peer, self._course.peer = self._course.peer, None
        self._course.parts.clear()
        self._course.is_sending = False
        if self._pairing.is_connected:
            log.warning("the standby %s is lost: %s", self._pairing.standby, why)
            self._pairing.gone()
            self._changed_at = self._clock.monotonic()
            self._changed.notify_all()
        if peer is not None:
            peer.close()

    def _welcome(self) -> None:
        """Begin with a standby that has arrived, once the last one is given up."""
        with self._changed:
            if self._arriving is None:
                return
            if self._course.peer is not None:
                self._drop("another connection took its place")
            if self._pairing.state is not PairState.ALONE:
                return  # the marker first
            (peer, hello), self._arriving = self._arriving, None
            committed = self._pairing.committed
            first = self._kept[0].number if self._kept else committed + 1
            is_near = hello.history == self._history and first - 1 <= hello.position <= committed
        history, position, parts = hello.history, hello.position, deque[Message]()
        if not is_near:
            try:
                history, position, content = copy_of(self._journal)
            except sqlite3.Error as error:
                raise WireError(f"the journal cannot be copied: {error}") from None
            parts = parts_of(history, position, content)
        with self._changed:
            self._course.peer, self._course.parts, self._course.sent = peer, parts, position
            self._course.is_sending, self._course.is_copying = False, bool(parts)
            now = self._clock.monotonic()
            # What is on its way is not there.
            self._pairing.attach(peer.subject, 0 if parts else position, now)
            self._changed_at = now
        peer.send(JournalHead(self._host, history, position, is_active=True))

    def _send(self) -> None:
        """Send the next message, if the last one was acknowledged."""
        with self._changed:
            peer, now = self._course.peer, self._clock.monotonic()
            if peer is None or self._course.is_sending:
                return
            message: Message
            if self._course.parts:
                message = self._course.parts.popleft()
            else:
                fresh = [r for r in self._kept if r.number > self._course.sent][:RECORDS_AT_ONCE]
                if not fresh and now - self._course.sent_at < SIGN_OF_LIFE_SECONDS:
                    return
                message = JournalRecords(tuple(fresh))
                self._course.sent = fresh[-1].number if fresh else self._course.sent
            self._course.is_sending, self._course.sent_at = True, now
        peer.send(message)
