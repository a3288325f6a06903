"""Two sresctld, the journal's shipping between them, and faults by seed: what must hold after each
takeover, whatever was lost, late, repeated or killed.

A kill -9 comes at any boundary of what either of them writes: its journal, the marker, the copy of
a journal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sqlite3
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.standby import pair_states
from slurm_resilience.controller.standby import shipper as shipping
from slurm_resilience.controller.standby.follower import JournalFile, is_newer
from slurm_resilience.controller.standby.pair_states import (
    Marker,
    Pairing,
    PairState,
    judge_takeover,
    next_history,
)
from slurm_resilience.controller.standby.recorded_connection import (
    POSITION,
    RecordedConnection,
    begin_history,
    history_of,
    position_of,
)
from slurm_resilience.controller.standby.shipper import Shipper
from slurm_resilience.errors import SlurmUnreachable, SresError
from slurm_resilience.wire.messages import JournalAck, JournalHead, JournalRecord, Message

HOSTS = ("ctl", "ctl2")
SEEDS = int(os.environ.get("SRES_TEST_SHIPPING", "30"))
STEPS = 600


class Clock:
    """Goes on when the simulation says so."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def now(self) -> float:
        return self.at


class Killed(BaseException):
    """A sresctld ends at once; nothing that it would still do is done."""


class Boundaries:
    """Counts what is written, and ends a sresctld at a place that was drawn."""

    def __init__(self) -> None:
        self.left = 0
        """Boundaries until the kill; 0: none is due."""
        self.kills = 0

    def cross(self) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                self.kills += 1
                raise Killed


class KillableConnection(RecordedConnection):
    """The active one's journal."""

    boundaries = Boundaries()

    def _commit(self) -> sqlite3.Cursor:
        self.boundaries.cross()
        cursor = super()._commit()
        self.boundaries.cross()
        return cursor


class KillableFile(JournalFile):
    """The standby's journal."""

    def __init__(self, path: Path, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        super().__init__(path)

    def take(self, message: Message) -> JournalAck | None:
        self._boundaries.cross()
        answer = super().take(message)
        self._boundaries.cross()
        return answer

    def _opened(self) -> sqlite3.Connection:
        self._boundaries.cross()  # after a copy: it is in its place
        return super()._opened()


class Link:
    """One connection, as the shipper sees it: what is under way may never arrive."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.to_standby = deque[Message]()
        self.to_active = deque[JournalAck]()
        self.is_closed = False

    def send(self, message: Message) -> None:
        if not self.is_closed:
            self.to_standby.append(message)

    def close(self) -> None:
        self.is_closed = True


class Machine:
    """One controller's machine: its disk, and the role of its sresctld."""

    def __init__(self, name: str, directory: Path, boundaries: Boundaries) -> None:
        self.name = name
        self.boundaries = boundaries
        self.path = directory / name / "journal.db"
        self.path.parent.mkdir()
        self.journal: Journal | None = None
        self.shipper: Shipper | None = None
        self.copy: JournalFile | None = JournalFile(self.path)
        self.handed_over_by = ""

    def connect(self, path: Path | str) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None, factory=KillableConnection)
        db.boundaries = self.boundaries
        return db

    def restart(self) -> None:
        """Begin as a standby, with what is on the disk."""
        if self.copy is not None:
            self.copy.close()
        if self.journal is not None:
            self.journal.close()
            self.journal = self.shipper = None
        self.handed_over_by = ""
        self.copy = KillableFile(self.path, self.boundaries)

    @contextlib.contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.path)
        try:
            yield db
        finally:
            db.close()

    def events(self) -> list[str]:
        with self.database() as db:
            return [text for (text,) in db.execute("SELECT text FROM events ORDER BY id")]


class World:
    """Both machines, the storage that they share, and everything that was ever begun."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.boundaries = Boundaries()
        self.machines = {name: Machine(name, directory, self.boundaries) for name in HOSTS}
        self.active = ""
        self.marker: Marker | None = None
        self.is_storage_full = False
        """The active machine can read the marker, and not write it."""
        self.link: Link | None = None
        self.begun: set[str] = set()
        self.waiting: list[tuple[str, int]] = []
        """Acts in the active one's journal that wait for permission: their text and record."""
        self.number = 0
        self.takeovers = 0
        self.whole = 0
        self.was_paired = 0
        """Takeovers by a standby that was named in the marker, without a word of the other one."""

    def write_marker(self, history: str, standby: str) -> None:
        if self.is_storage_full:
            raise SlurmUnreachable("the storage is full")
        self.boundaries.cross()
        self.marker = Marker(history.partition("-")[2], history, standby)
        self.boundaries.cross()

    # -- roles --------------------------------------------------------------------------------

    def take_over(self, name: str) -> None:
        """Another machine's slurmctld is in control: its sresctld takes the other one's place."""
        self.is_storage_full = False
        machine, self.active = self.machines[name], name
        assert machine.copy is not None
        machine.copy.close()
        machine.copy = None
        with machine.database() as db:
            history = history_of(db)
        judged = judge_takeover(name, history, self.marker, machine.handed_over_by)
        for one in self.machines.values():
            one.handed_over_by = ""
        known = set(machine.events())
        self.takeovers += 1
        if judged.is_whole:
            self.whole += 1
            self.was_paired += "no record here" in judged.text
            assert self.begun <= known, f"{judged.text}: it lacks {self.begun - known}"
        else:
            self.begun &= known  # the others are left to a person
        machine.journal = Journal(machine.path, machine.connect)
        db = machine.journal._db
        assert isinstance(db, RecordedConnection)
        fresh = next_history(name, history, self.marker.history if self.marker else "")
        self.write_marker(fresh, "")
        begin_history(db, fresh)
        self.boundaries.cross()
        machine.shipper = Shipper(
            name, fresh, machine.path, position_of(db), self.write_marker, self.clock
        )
        db.begin_with(self.committed)
        self.waiting, self.link = [], None

    def committed(self, record: JournalRecord) -> None:
        self.boundaries.cross()
        if self.shipper is not None:
            self.shipper.committed(record)
            if self.chance.random() < 0.3:
                # It ships in a thread of its own, which does not wait for the cycle.
                for act in (self.turn, self.deliver, self.deliver, self.acknowledge):
                    act()
        self.boundaries.cross()

    def end(self, name: str) -> None:
        """Its sresctld is killed, or deposed; what it has on its disk stays."""
        machine = self.machines[name]
        if machine.journal is not None:
            machine.journal.close()
            machine.journal = machine.shipper = None
        self.link = None
        if machine.copy is None:
            machine.copy = KillableFile(machine.path, self.boundaries)
        machine.copy.forget_part()

    # -- what happens -------------------------------------------------------------------------

    def step(self) -> None:
        self.clock.at += self.chance.choice((0.01, 0.02, 0.05, 0.2, 1.0))
        kinds = {
            self.write: 6.0, self.wish: 6.0, self.turn: 20.0, self.deliver: 20.0,
            self.acknowledge: 20.0, self.begin: 10.0, self.connect: 6.0, self.cut: 2.0,
            self.switch: 0.7, self.storage: 2.0,
        }  # fmt: skip
        (kind,) = self.chance.choices(list(kinds), list(kinds.values()))
        if not self.boundaries.left and self.chance.random() < 0.03:
            self.boundaries.left = self.chance.randint(1, 9)
        try:
            kind()
        except Killed:
            if kind == self.deliver:
                self.standby.restart()
                self.cut()
                return
            if kind != self.switch:
                self.check_prefix()
            for machine in self.machines.values():
                machine.restart()
            self.take_over(self.chance.choice(HOSTS))

    def write(self) -> None:
        if journal := self.journal:
            self.number += 1
            for _ in range(self.chance.choice((1, 1, 5))):
                journal.event(self.clock.at, "seen", f"seen {self.number}")

    def wish(self) -> None:
        if journal := self.journal:
            self.number += 1
            text = f"act {self.number}"
            journal.event(self.clock.at, "replacing", text)
            db = journal._db
            assert isinstance(db, RecordedConnection)
            self.waiting.append((text, db.position))

    def begin(self) -> None:
        """Begin what may be begun, as `PairGate.begin_act` does."""
        shipper = self.shipper
        if shipper is None or self.marker is None or self.marker.host != self.active:
            return
        for act in list(self.waiting):
            if shipper.may_begin(act[1]):
                self.boundaries.cross()
                self.waiting.remove(act)
                self.begun.add(act[0])
                self.boundaries.cross()

    def turn(self) -> None:
        if shipper := self.shipper:
            with contextlib.suppress(SresError):
                shipper.turn()

    def connect(self) -> None:
        standby = self.standby
        if self.shipper is not None and standby.copy is not None and self.link is None:
            standby.copy.forget_part()
            self.link = Link(standby.name)
            self.shipper.attach(self.link, standby.copy.hello())

    def deliver(self) -> None:
        link, copy = self.link, self.standby.copy
        if link is None or copy is None or not link.to_standby:
            return
        message = link.to_standby.popleft()
        if isinstance(message, JournalHead):
            return
        answer = copy.take(message)
        if self.chance.random() < 0.1:
            copy.take(message)  # records that are told twice
        if answer is not None:
            link.to_active.append(answer)

    def acknowledge(self) -> None:
        if self.link is not None and self.shipper is not None and self.link.to_active:
            self.shipper.acknowledged(self.link, self.link.to_active.popleft())

    def cut(self) -> None:
        link, self.link = self.link, None
        if link is not None and self.shipper is not None and self.chance.random() < 0.5:
            self.shipper.detach(link)  # else it finds out by itself

    def switch(self) -> None:
        """slurmctld changes its place: the active one's machine is lost, or hands over."""
        before, after = self.active, self.standby.name
        self.check_prefix()
        self.end(before)
        if self.chance.random() < 0.3:
            self.hand_over(before, after)
        self.take_over(after)

    def hand_over(self, before: str, after: str) -> None:
        """The deposed one gives its whole journal."""
        giver, taker = self.machines[before], self.machines[after]
        assert giver.copy is not None
        assert taker.copy is not None
        taker.copy.forget_part()
        ours, theirs = taker.copy.hello(), giver.copy.hello()
        if is_newer(theirs.history, theirs.position, ours.history, ours.position):
            for part in shipping.parts_of(*shipping.copy_of(giver.path)):
                taker.copy.take(part)
        taker.handed_over_by = before

    def storage(self) -> None:
        self.is_storage_full = self.chance.random() < 0.5

    # -- what must hold -----------------------------------------------------------------------

    def check_prefix(self) -> None:
        """The standby's journal is the beginning of the active one's, with all that it has
        acknowledged."""
        active, standby = self.machines[self.active], self.standby
        with active.database() as ours, standby.database() as theirs:
            if history_of(ours) != history_of(theirs):
                return
            assert position_of(theirs) <= position_of(ours)
        events = standby.events()
        assert active.events()[: len(events)] == events

    @property
    def journal(self) -> Journal | None:
        return self.machines[self.active].journal

    @property
    def shipper(self) -> Shipper | None:
        return self.machines[self.active].shipper

    @property
    def standby(self) -> Machine:
        return next(one for name, one in self.machines.items() if name != self.active)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of lost standbys need no line each."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def run(seed: int) -> World:
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        world = World(seed, Path(directory))
        world.take_over("ctl")
        try:
            for _ in range(STEPS):
                world.step()
        finally:
            for machine in world.machines.values():
                for one in (machine.journal, machine.copy):
                    if one is not None:
                        one.close()
        return world


def test_a_whole_takeover_lacks_no_act_that_was_begun() -> None:
    worlds = [run(seed) for seed in range(SEEDS)]
    assert sum(world.whole for world in worlds) > SEEDS / 2
    assert sum(world.takeovers - world.whole for world in worlds) > SEEDS / 10
    assert sum(world.was_paired for world in worlds) > SEEDS / 4
    assert sum(len(world.begun) for world in worlds) > 5 * SEEDS
    assert sum(world.boundaries.kills for world in worlds) > 5 * SEEDS


def _acts_while_lost(self: Pairing, number: int) -> bool:
    return self.state is PairState.LOST or self.acknowledged >= number or self.state in (
        PairState.ALONE, PairState.CATCHING_UP
    )  # fmt: skip


def _acts_while_paired(self: Pairing, number: int) -> bool:
    return self.state is not PairState.LOST


def _counts_what_was_sent(self: Pairing, number: int, now: float) -> None:
    self.acknowledged, self.heard_at = self.committed, now


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("may_begin", _acts_while_lost),
        ("may_begin", _acts_while_paired),
        ("acknowledge", _counts_what_was_sent),
    ],
)
def test_a_rule_that_is_left_out_is_found(
    name: str, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_states.Pairing, name, mutant)
    with pytest.raises(AssertionError, match="it lacks"):
        for seed in range(SEEDS):
            run(seed)


def _tells_before_it_has_written(self: RecordedConnection) -> sqlite3.Cursor:
    statements, self._statements = self._statements or [], None
    if statements and self.on_commit is not None:
        self.position += 1
        write = (str(self.position), POSITION)
        sqlite3.Connection.execute(self, "UPDATE settings SET value = ? WHERE name = ?", write)
        self.on_commit(JournalRecord(self.position, tuple(statements)))
    return sqlite3.Connection.execute(self, "COMMIT")


def test_a_record_that_is_told_before_it_is_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecordedConnection, "_commit", _tells_before_it_has_written)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            run(seed)
