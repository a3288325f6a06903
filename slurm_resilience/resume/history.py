"""Keep the attempts of one supervised srun in a file that outlives requeues of its job.

It lies beside the fence's directories, is written anew after each attempt, and is removed when the
program has ended for good. While it cannot be written, the history lasts as long as the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.resume import report
from slurm_resilience.resume.attempt import read_file, write_file
from slurm_resilience.resume.decide.classify import Ending, classify
from slurm_resilience.resume.decide.goodput import Goodput, SpentAttempt, add_up
from slurm_resilience.resume.decide.signatures import Category
from slurm_resilience.resume.elastic.size_target import AskedSize

SUFFIX = ".history"
FOLDER = ".sres"
"""In it each user has a folder of his own, named by his uid."""
MOST_BYTES = 64 * 1024 * 1024
KEEP_SECONDS = 30 * 86400.0
"""The file of a job that never came back is removed after this time."""
LOST = "its supervisor was lost"
LATEST_SECONDS = 1e11
"""Seconds since the epoch that a date can be made of."""
_NAME = r"[A-Za-z0-9_.-]{1,255}"


class PastAttempt(msgspec.Struct, frozen=True):
    """One attempt, and how it ended."""

    number: int
    restarts: int
    """Requeues of the job before it."""
    nodes: tuple[str, ...]
    started: float
    """Seconds since the epoch."""
    ending: Ending | None = None
    """None: it runs, or its supervisor was lost with it."""
    cause: str = ""
    """The reason of the end, in words."""
    step: int = -1
    """The last step that the program had reported when it ended; -1: none."""
    lost_seconds: float | None = None
    """Work that is not behind a step which it reported; None: not known."""
    stopped: dict[str, float] = {}
    """Kind of fault → seconds in which nothing stepped, though the attempt lived on."""
    phases: dict[str, float] = {}
    """Phase of the way here from the attempt before → seconds since the fault was noticed."""
    target: AskedSize = AskedSize()
    """The number of nodes that a person has asked for; 0 nodes: none has."""
    next_way: str = ""
    """The way on if a node failed now, in words; empty: not known."""
    next_nodes: tuple[str, ...] = ()
    """Those that the next attempt is to have, or that a living step goes on with: they are claimed
    before the job has them, or a step of its own is seen there."""

    @property
    def lost(self) -> str:
        """Return in words what its end cost; empty: that is not known."""
        if self.ending is None or self.lost_seconds is None:
            return ""
        if self.ending.progressed:
            return f"{self.lost_seconds:.0f} s of work, since step {self.step} was reported"
        most = f"{self.lost_seconds:.0f} s of work at most"
        return f"{most}: attempt {self.number} reported no checkpoint"


class AttemptHistory:
    """The attempts of one supervised srun, those before a requeue of the job included."""

    def __init__(
        self,
        folder: Path | None,
        job: int,
        restarts: int,
        words: Sequence[str],
        supervisor: int | None = None,
    ) -> None:
        """
        Args:
            folder: for the file; None: nothing is written.
            job: job id.
            restarts: how often Slurm has requeued it.
            words: srun's arguments, which tell the sruns of a job apart.
            supervisor: its pid; None: this process's own.
        """
        self._folder = folder
        self._restarts = restarts
        self._supervisor = os.getpid() if supervisor is None else supervisor
        key = f"{zlib.crc32(os.fsencode(chr(0).join(words))):08x}"
        self._prefix = f"job-{job}-{key}-"
        self.attempts: list[PastAttempt] = []
        self._lock = threading.RLock()
        """Held while an attempt is changed: the search for a node claims it in its own thread."""
        self._is_behind = False
        """The file could not be written last: the disk was full, or the folder removed."""

    @property
    def endings(self) -> tuple[Ending, ...]:
        """Return all endings so far, oldest first."""
        return tuple(past.ending for past in self.attempts if past.ending is not None)

    @property
    def last_ending(self) -> Ending | None:
        """Return the last ending since the job was started; None: there is none."""
        mine = [past for past in self.attempts if past.restarts == self._restarts]
        return next((past.ending for past in reversed(mine) if past.ending is not None), None)

    @property
    def had_faults(self) -> bool:
        """Return whether an attempt before the last one has ended, or a node was at fault."""
        return len(self.attempts) > 1 or any(ending.faulty for ending in self.endings)

    @property
    def next_number(self) -> int:
        """Return the number of the next attempt, from 1."""
        return self.attempts[-1].number + 1 if self.attempts else 1

    @property
    def last_step(self) -> int:
        """Return the last step that was reported before the running attempt; -1: none."""
        return max((past.step for past in self.attempts), default=-1)

    @property
    def lost(self) -> str:
        """Return in words what the last end of an attempt cost; empty: that is not known."""
        ended = [past for past in self.attempts if past.ending is not None]
        return ended[-1].lost if ended else ""

    @property
    def cause_of_requeue(self) -> PastAttempt | None:
        """Return the attempt whose end led to the requeue; None: it is not known."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.cause not in ("", LOST) else None

    def begin(self, clock: Clock) -> None:
        """Take over the file that this srun had before a requeue of its job."""
        if self._folder is None:
            return
        for path, attempts in self._older(clock.now()):
            try:
                path.rename(self._path)
            except OSError:
                continue  # another srun of the same words was faster
            self.attempts = [_closed(past, clock.now()) for past in attempts]
            return

    def start(self, number: int, nodes: tuple[str, ...], now: float) -> None:
        """Note that an attempt begins."""
        with self._lock:
            self.attempts.append(PastAttempt(number, self._restarts, nodes, now))
            self._write()

    def end(self, ending: Ending, cause: str, step: int, lost_seconds: float | None = None) -> None:
        """Note how the last attempt ended."""
        with self._lock:
            self.attempts[-1] = msgspec.structs.replace(
                self.attempts[-1], ending=ending, cause=cause, step=step, lost_seconds=lost_seconds
            )
            self._write()

    def came_back(self, phases: dict[str, float]) -> None:
        """Note how long the way to the running attempt took."""
        with self._lock:
            self.attempts[-1] = msgspec.structs.replace(self.attempts[-1], phases=phases)
            self._write()

    def goes_on_by(self, way: str) -> None:
        """Note what would follow if a node of the running attempt failed."""
        with self._lock:
            self.attempts[-1] = msgspec.structs.replace(self.attempts[-1], next_way=way)
            self._write()

    def takes(self, nodes: tuple[str, ...]) -> None:
        """Note the nodes with which the srun goes on; none: it has no way yet."""
        with self._lock:
            if self.attempts and nodes != self.attempts[-1].next_nodes:
                self.attempts[-1] = msgspec.structs.replace(self.attempts[-1], next_nodes=nodes)
                self._write()

    def stood_still(self, cause: str, seconds: float) -> None:
        """Note how long nothing stepped in the running attempt, for a fault that it survived."""
        with self._lock:
            last = self.attempts[-1]
            known = last.stopped.get(cause, 0.0)
            self.attempts[-1] = msgspec.structs.replace(
                last, stopped=last.stopped | {cause: known + seconds}
            )
            self._write()

    @property
    def target(self) -> AskedSize:
        """Return the number of nodes that a person asked for last."""
        asked = (past.target for past in reversed(self.attempts) if past.target.by)
        return next(asked, AskedSize())

    def aims_at(self, target: AskedSize) -> None:
        """Note the number of nodes that a person has asked for."""
        with self._lock:
            if target.by and target != self.attempts[-1].target:
                self.attempts[-1] = msgspec.structs.replace(self.attempts[-1], target=target)
                self._write()

    def goodput(self) -> Goodput | None:
        """Return where the time went; None: nothing was lost, or no attempt has ended."""
        return goodput_of(self.attempts)

    def remove(self) -> None:
        """Remove the file: the program has ended for good."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._prefix}{self._supervisor}{SUFFIX}"

    def _older(self, now: float) -> Iterator[tuple[Path, list[PastAttempt]]]:
        assert self._folder is not None
        with contextlib.suppress(OSError):
            # This machine's date may be wrong. Each supervisor makes its directory in here first.
            now = min(now, self._folder.stat().st_mtime)
        paths: list[Path] = []
        try:
            paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            report.say(f"the attempts before this start cannot be read: {error}")
        for path in paths:
            if not path.name.startswith(self._prefix):
                with contextlib.suppress(OSError):
                    if now - path.lstat().st_mtime > KEEP_SECONDS:
                        path.unlink()
                continue
            attempts = read(path)
            if attempts and attempts[-1].restarts < self._restarts:
                yield path, attempts

    def _write(self) -> None:
        if self._folder is None:
            return
        new = self._path.with_suffix(".new")
        try:
            write_file(new, msgspec.json.encode(self.attempts))
            new.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            if not self._is_behind:
                report.say(f"the attempts are not kept for a requeue: {error}")
            self._is_behind = True
            return
        if self._is_behind:
            report.say(f"the attempts are kept again, in {self._path}")
        self._is_behind = False


def goodput_of(attempts: Sequence[PastAttempt], now: float = 0.0) -> Goodput | None:
    """Return where the time of these attempts went; None: nothing was lost, or none has ended.

    Args:
        attempts: the oldest first.
        now: until when a running attempt counts, as one that has lost nothing so far; seconds since
            the epoch. 0: it does not count.
    """
    spent = [_spent(past) for past in attempts if past.ending is not None]
    if not spent or (len(spent) == 1 and not spent[0].stopped and not now):
        return None
    last = attempts[-1]
    runs = last.ending is None and now > 0
    if runs:
        until = max(now, last.started)
        spent.append(SpentAttempt(last.started, until, "", stopped=last.stopped))
    return add_up(spent, ended_well=runs or (last.ending is not None and last.ending.code == 0))


def read(path: Path) -> list[PastAttempt]:
    """Return the attempts of a file; none where it cannot be read."""
    try:
        # It lies in a user's folder: no link to elsewhere is followed, and no pipe is waited for.
        attempts = msgspec.json.decode(read_file(path, MOST_BYTES), type=list[PastAttempt])
    except (OSError, msgspec.DecodeError, RecursionError):
        return []
    # A user may write there what he likes, and `sres job show` may be an administrator's.
    return attempts if all(map(_makes_sense, attempts)) else []


def _makes_sense(past: PastAttempt) -> bool:
    ending = past.ending
    times = (past.started, *((ending.ran_for, ending.ended_at) if ending is not None else ()))
    spent = (past.lost_seconds or 0.0, *past.stopped.values(), *past.phases.values())
    known_nodes = all(re.fullmatch(_NAME, name) for name in past.nodes + past.next_nodes)
    return (
        known_nodes
        and all(0.0 <= at <= LATEST_SECONDS for at in times)
        and all(abs(seconds) <= LATEST_SECONDS for seconds in spent)
    )


def read_all(directory: Path, job: int) -> list[list[PastAttempt]]:
    """Return the attempts of each supervised srun of a job that has not ended for good.

    Args:
        directory: the one in which its sruns were started.
        job: job id.
    """
    paths = sorted(directory.glob(f"{FOLDER}*/*/job-{job}-*{SUFFIX}"))
    return [attempts for path in paths if (attempts := read(path))]


class OtherSrun(NamedTuple):
    """Another supervised srun of a job."""

    supervisor: int
    """Its process number."""
    nodes: tuple[str, ...]
    """Those of its last attempt, and those that it claims."""
    next_nodes: tuple[str, ...]
    """Those that it claims."""
    started: float
    """When its last attempt did, seconds since the epoch."""


def other_sruns(
    base: Path, uid: int, supervisor: int, run: tuple[int, int], lives: Callable[[int], bool]
) -> tuple[OtherSrun, ...]:
    """Return a job's other supervised sruns, with their nodes.

    Slurm shows no step of theirs between two attempts. Only those are known that were started in
    the same directory, and on this machine.

    Args:
        base: the directory in which the sruns were started.
        uid: the user.
        supervisor: process number of the one that asks.
        run: the job, and how often Slurm has requeued it.
        lives: tells whether a process runs here: a supervisor that was killed leaves its file.
    """
    job, restarts = run
    name = re.compile(rf"job-{job}-[0-9a-f]{{8}}-(\d{{1,10}}){re.escape(SUFFIX)}")
    others: list[OtherSrun] = []
    for folder in (base / FOLDER / str(uid), base / f"{FOLDER}-{uid}" / str(uid)):
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()):
                found = name.fullmatch(path.name)
                if found is None or int(found[1]) == supervisor or not lives(int(found[1])):
                    continue
                attempts = read(path)
                if attempts and attempts[-1].restarts == restarts:
                    last = attempts[-1]
                    nodes = (*last.nodes, *last.next_nodes)
                    others.append(OtherSrun(int(found[1]), nodes, last.next_nodes, last.started))
    return tuple(others)


def _spent(past: PastAttempt) -> SpentAttempt:
    ending = past.ending
    assert ending is not None
    category = Category.UNKNOWN if past.cause == LOST else classify(ending).category
    return SpentAttempt(
        past.started,
        max(past.started, ending.ended_at or past.started + ending.ran_for),
        category.value,
        # It was cut off, and what it had done by then is not known.
        ending.ran_for if past.cause == LOST else past.lost_seconds or 0.0,
        is_exact=ending.progressed,
        stopped=past.stopped,
    )


def _closed(past: PastAttempt, now: float) -> PastAttempt:
    """Return an attempt of an earlier start of the job: it has ended, known or not."""
    if past.ending is not None:
        return past
    lost = Ending(
        code=1,
        ran_for=max(0.0, now - past.started),
        progressed=False,
        job_state="",
        faulty={"": LOST},
        ended_at=now,
        nodes=past.nodes,
    )
    return msgspec.structs.replace(past, ending=lost, cause=LOST)
