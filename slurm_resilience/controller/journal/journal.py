"""The journal: all that was seen, decided and done, in SQLite; the only way into the next cycle.

Writing is the cycle's alone (one thread, one process). Reading through `sres` goes over the wire.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec

from slurm_resilience.controller.journal.event_table import EventTable
from slurm_resilience.controller.journal.fault_memory import FaultMemory
from slurm_resilience.controller.journal.incident_table import IncidentTable
from slurm_resilience.controller.journal.journal_file import (
    open_database,
    open_journal,
    read_setting,
    together,
    write_setting,
)
from slurm_resilience.controller.journal.known_peers import KnownPeers
from slurm_resilience.controller.journal.records import (
    HOUR_SECONDS,
    USERS_WORDS_SECONDS,
    WOULD_REPLACE,
    JournalMemory,
    KnownAgent,
    NamedModes,
    ProvenDate,
)
from slurm_resilience.controller.journal.spare_table import SpareTable
from slurm_resilience.errors import SresError


class Journal(EventTable, IncidentTable, FaultMemory, KnownPeers, SpareTable):
    """The journal's file, with all its tables."""

    def __init__(
        self,
        path: Path | str,
        connect: Callable[[Path | str], sqlite3.Connection] = open_database,
    ) -> None:
        """Open the file, or make it.

        Args:
            path: the file.
            connect: opens a database; the simulator has one of its own.

        Raises:
            SresError: the file cannot be opened, or another version of sresctld wrote it.
        """
        self._path = path
        self._number_after = 0
        self._agents: dict[str, KnownAgent] | None = None
        self._db = open_journal(path, connect)
        self._files = {name: _file_of(name) for name in (path, f"{path}-wal")}

    @property
    def is_in_place(self) -> bool:
        """Tell whether the file is still the one that was opened, and the -wal beside it, in which
        the newest part is: what is written into a removed one is lost with this process."""
        known = ((name, file) for name, file in self._files.items() if file is not None)
        return all(_file_of(name) == file for name, file in known)

    def close(self) -> None:
        self._db.close()

    def prune(self, before: float) -> None:
        """Drop events older than ``before`` (epoch), and incidents that ended before it. One that
        left its node to a person stays as long as it is the node's last."""
        self._db.execute("DELETE FROM events WHERE at < ?", (before,))
        self._prune_incidents(before)
        self._db.execute("DELETE FROM observed WHERE ended > 0 AND ended < ?", (before,))

    def follow_date(self, before: float, date: float, window: float) -> None:
        """Let what counts keep its age when the machine's date was set: else the ceilings of an
        hour would forget what was before, or count it for longer.

        Args:
            before: the date (epoch) that sresctld went by.
            date: the machine's.
            window: seconds for which events count. Older ones keep their date, but those in the
                future.
        """
        step = date - before
        with together(self._db):
            oldest = min(date, before - window)
            self._db.execute("UPDATE events SET at = at + ? WHERE at > ?", (step, oldest))
            self._db.execute("UPDATE missing SET since = since + ?", (step,))
            for fault in self.faults().values():
                self.put_fault(msgspec.structs.replace(fault, began=fault.began + step))
            breaker = self.breaker()
            if breaker.reset_at:
                reset_at = max(0.0, breaker.reset_at + step)
                self.put_breaker(msgspec.structs.replace(breaker, reset_at=reset_at))

    def memory(
        self, now: float, flap_window: float, recurrence_window: float = 0.0
    ) -> JournalMemory:
        """Return what still counts at this moment (epoch)."""
        return JournalMemory(
            self.acknowledged(),
            self.kept(),
            self.flaps(now - flap_window),
            self.starts(now - HOUR_SECONDS),
            self.faults(),
            self.missing(),
            self.breaker(),
            {fault.node: fault for fault in self.observed(open_only=True)},
            self.left_overs(now - HOUR_SECONDS),
            self.repairs(now - recurrence_window),
            self.starts(now - HOUR_SECONDS, WOULD_REPLACE),
            self.released(now - HOUR_SECONDS),
            self.deaths(now - HOUR_SECONDS),
            self.spares(),
            self.users_words(now - USERS_WORDS_SECONDS),
        )

    @property
    def paused(self) -> str:
        """The reason of the pause; empty: sresctld is not paused."""
        return read_setting(self._db, "paused")

    def pause(self, reason: str) -> None:
        """Pause with a reason, or go on with an empty one."""
        write_setting(self._db, "paused", reason)

    def claim(self, cluster: str) -> None:
        """Keep the name of the cluster that this journal is of.

        Raises:
            SresError: it is another one's.
        """
        known = read_setting(self._db, "cluster")
        if known not in ("", cluster):
            raise SresError(
                f"the journal {self._path} is of cluster {known}, and Slurm here is cluster "
                f"{cluster}: nodes of the same name would be taken for each other's. Set another "
                "controller.state_dir, or move the journal away (sresctld then starts with an "
                "empty one, and is not paused)"
            )
        if not known and cluster:
            write_setting(self._db, "cluster", cluster)

    @property
    def host(self) -> str:
        """The machine whose sresctld wrote this journal last, without a standby; empty: it is not
        known."""
        return read_setting(self._db, "host")

    def put_host(self, name: str) -> None:
        write_setting(self._db, "host", name)

    def named_modes(self) -> NamedModes:
        """Return the names that had a mode of their own at the last start."""
        text = read_setting(self._db, "named_modes")
        return msgspec.json.decode(text, type=NamedModes) if text else NamedModes()

    def put_named_modes(self, names: NamedModes) -> None:
        write_setting(self._db, "named_modes", msgspec.json.encode(names).decode())

    def proven_date(self) -> ProvenDate | None:
        """Return the machine's date as it was seen last; None: never."""
        text = read_setting(self._db, "proven_date")
        return msgspec.json.decode(text, type=ProvenDate) if text else None

    def put_proven_date(self, date: ProvenDate) -> None:
        write_setting(self._db, "proven_date", msgspec.json.encode(date).decode())


def _file_of(path: Path | str) -> tuple[int, int] | None:
    """Return the numbers by which the system knows a file; None: there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
