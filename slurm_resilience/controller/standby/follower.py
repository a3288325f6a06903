"""The standby's side: a copy of the active sresctld's journal, kept up to date."""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.standby.pair_states import epoch_of
from slurm_resilience.controller.standby.recorded_connection import (
    apply_records,
    history_of,
    position_of,
)
from slurm_resilience.errors import SresError, WireError
from slurm_resilience.wire.messages import (
    JournalAck,
    JournalCopy,
    JournalHead,
    JournalRecords,
    Message,
    StandbyHello,
)

log = logging.getLogger("sresctld.standby")

KEPT_ASIDE = "journal.db.before-copy"
"""Our journal as it was before another one took its place, for people."""


def is_newer(history: str, position: int, than: str, than_position: int) -> bool:
    """Tell whether a journal is a later one than another."""
    if history == than:
        return position > than_position
    return epoch_of(history) > epoch_of(than)


class JournalFile:
    """The standby's journal, closed while nothing is written to it."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it.

        Args:
            path: the file.

        Raises:
            SresError: it cannot be opened, or another version of sresctld wrote it.
        """
        self._path = path
        self._db = self._opened()
        self._copy = bytearray()

    def close(self) -> None:
        self._db.close()

    def hello(self) -> StandbyHello:
        return StandbyHello(history_of(self._db), position_of(self._db))

    def take(self, message: Message) -> JournalAck | None:
        """Take in a message of the side that ships; return what to answer, if anything.

        Raises:
            SresError: it does not fit, or cannot be written.
        """
        try:
            match message:
                case JournalCopy():
                    return self._take_part(message)
                case JournalRecords():
                    if message.records:
                        return JournalAck(apply_records(self._db, message.records))
                    return JournalAck(position_of(self._db))
                case _:
                    return None
        except (sqlite3.Error, OSError, ValueError) as error:
            raise SresError(f"the standby's journal {self._path}: {error}") from None

    def forget_part(self) -> None:
        """Forget the beginning of a copy: its rest will not come."""
        self._copy.clear()

    def _opened(self) -> sqlite3.Connection:
        Journal(self._path).close()  # makes it, and checks its version
        db = sqlite3.connect(self._path, isolation_level=None)
        # What was acknowledged must be there after a loss of power.
        db.execute("PRAGMA synchronous=FULL")
        return db

    def _take_part(self, message: JournalCopy) -> JournalAck:
        self._copy += message.part
        if message.left:
            return JournalAck(0)
        content, self._copy = bytes(self._copy), bytearray()
        fresh = self._path.with_name("journal.db.new")
        for name in ("journal.db.new-wal", "journal.db.new-shm"):
            self._path.with_name(name).unlink(missing_ok=True)
        _write_durably(fresh, content)
        if (found := _head_of(fresh)) != (message.history, message.position):
            raise WireError(f"a copy of {found}, not of {message.history} {message.position}")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        for name in ("journal.db-wal", "journal.db-shm"):
            self._path.with_name(name).unlink(missing_ok=True)
        aside = self._path.with_name(KEPT_ASIDE)
        aside.unlink(missing_ok=True)
        os.link(self._path, aside)
        fresh.replace(self._path)  # at no moment is there none
        self._db = self._opened()
        log.info("the journal was copied: %s, record %d", message.history, message.position)
        return JournalAck(message.position)


def wants_copy(own: StandbyHello, head: JournalHead) -> bool:
    """Tell whether a side that is not active sends us its journal."""
    return is_newer(head.history, head.position, own.history, own.position)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _head_of(path: Path) -> tuple[str, int]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        return history_of(db), position_of(db)
    finally:
        db.close()
