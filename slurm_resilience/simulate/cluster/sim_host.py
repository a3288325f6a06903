"""Simulated replacement programs on sresctld's machine: they succeed, fail, hang, lie, or half do
it. Their runs are kept in real directories, by the product's own code."""

from __future__ import annotations

import enum
import errno
import shutil
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from random import Random
from typing import Protocol

from slurm_resilience.replace.program import LOCK, OUTPUT, RESULT, RUNNER, write_in_place
from slurm_resilience.simulate.cluster.sim_machine import SimMachine
from slurm_resilience.simulate.schedule import Schedule

TIMEOUT_RC = 124
TERMINATED_RC = 143
KILL_SECONDS = 10.0
"""Between SIGTERM and SIGKILL for a program that does not heed the first."""


class Manner(enum.Enum):
    """The way in which a program does its work."""

    GOOD = "the node comes back"
    SLOW = "the node comes back long after the program's end"
    FAILS = "fails at once, and leaves the node alone"
    HANGS = "hangs until its time is over"
    LIES = "exits 0 and does nothing"
    HALF_DONE = "powers the node off, then fails"
    LOSES_NODE = "exits 0, and the node never comes back"
    SICK_AGAIN = "the node comes back with the same fault"


class SimRun:
    """A process of the program, with its runner."""

    def __init__(self, directory: Path, verb: str, node: str, began: float) -> None:
        self.directory = directory
        self.verb = verb
        self.node = node
        self.began = began
        self.looked_at = began
        """When sresctld last looked at the node before it."""
        self.lives = True
        self.ended_unseen = -inf
        """When it ended, where its exit code could not be written down."""
        self.manner = Manner.GOOD

    @property
    def intent(self) -> str:
        """The incident and the attempt."""
        return self.directory.name


class ProgramWatcher(Protocol):
    """Is told of each start of a program and of each order to end one."""

    def run_started(self, run: SimRun) -> None:
        """Take in that a program begins."""
        ...

    def run_terminated(self, run: SimRun) -> None:
        """Take in that sresctld sent it SIGTERM."""
        ...


class SimHost:
    """A `RunHost`: processes are entries of a table."""

    def __init__(
        self,
        schedule: Schedule,
        random: Random,
        machines: dict[str, SimMachine],
    ) -> None:
        self._schedule = schedule
        self._random = random
        self._machines = machines
        self.runs: dict[Path, SimRun] = {}
        self._full_since = inf
        self._looked_early = False
        """The last look came just before the room was gone."""
        self.manners: list[Manner] = [Manner.GOOD]
        """The program behaves as one of these."""
        self.seconds = (3.0, 20.0)
        """Shortest and longest time of a program."""
        self.watcher: ProgramWatcher | None = None
        self.boundary: Callable[[str], None] = lambda _: None
        """Called at each moment at which sresctld may be killed."""

    @property
    def full(self) -> bool:
        """The disk of the run directories is full."""
        return self._full_since < inf

    @full.setter
    def full(self, is_full: bool) -> None:
        # A second fault ends with the first one.
        self._full_since = min(self._full_since, self._schedule.now) if is_full else inf
        self._looked_early = False

    def was_full_at(self, moment: float) -> bool:
        """Tell whether a look at that moment showed the disk as full, and it is still."""
        return self._full_since < moment and not self._looked_early

    @property
    def is_busy(self) -> bool:
        """A program runs, and has its directory."""
        return any(run.lives and run.directory.exists() for run in self.runs.values())

    def remove_runs(self) -> None:
        """Have a person remove the directories of all runs."""
        for directory in self.runs:
            shutil.rmtree(directory, ignore_errors=True)

    def restart_seconds(self) -> float:
        """Draw the time until systemd starts sresctld again."""
        return self._random.choice((0.5, 2.0, 5.0, 30.0))

    # -- RunHost ------------------------------------------------------------------------------

    def lack_of_room(self, directory: Path) -> str:
        # It may be the last look before the room is gone.
        self._looked_early = self.full and self._random.random() >= 0.9
        return "no room" if self.full and not self._looked_early else ""

    def make(self, directory: Path) -> None:
        self.boundary("before a run's directory")
        if self.full and self._random.random() < 0.7:
            raise OSError(errno.ENOSPC, "No space left on device")
        directory.mkdir(parents=True)
        if self.full:
            # The room is gone between one file and the next.
            raise OSError(errno.ENOSPC, "No space left on device")
        for name in (RESULT, RUNNER):
            write_in_place(directory / name, "")
        for name in (LOCK, OUTPUT):
            (directory / name).touch(mode=0o600)
        self.boundary("after a run's directory")

    def spawn(self, directory: Path, argv: Sequence[str]) -> None:
        limit, verb, node = float(argv[argv.index("--") - 1]), argv[-2], argv[-1]
        run = SimRun(directory, verb, node, self._schedule.now)
        run.manner = self._random.choice(self.manners)
        self.runs[directory] = run
        write_in_place(directory / RUNNER, "1")  # a runner's first act
        if self.watcher is not None:
            self.watcher.run_started(run)
        self._work(run, limit)
        self.boundary("after a program's start")

    def is_held(self, directory: Path) -> bool:
        run = self.runs.get(directory)
        return run is not None and run.lives

    def terminate(self, directory: Path) -> None:
        run = self.runs.get(directory)
        if run is None or not run.lives:
            return
        if self.watcher is not None:
            self.watcher.run_terminated(run)
        delay = KILL_SECONDS if run.manner is Manner.HANGS else 0.2
        self._schedule.after(delay, self._exit, run, TERMINATED_RC)

    def reap(self) -> None:
        return

    # -- the programs -------------------------------------------------------------------------

    def _work(self, run: SimRun, limit: float) -> None:
        seconds = min(self._random.uniform(*self.seconds), limit)
        machine = self._machines.get(run.node)
        after = self._schedule.after
        if run.manner is Manner.HANGS:
            after(limit, self._exit, run, TIMEOUT_RC)
        elif run.manner is Manner.FAILS or machine is None:
            after(min(1.0, limit), self._exit, run, 1)
        elif run.manner is Manner.LIES:
            after(seconds, self._exit, run, 0)
        else:
            after(seconds * 0.6, self._turn_off, run, machine, seconds * 0.4)

    def _turn_off(self, run: SimRun, machine: SimMachine, seconds: float) -> None:
        """Take the machine away, and bring another one or the same one, as its manner says."""
        if not run.lives:
            return
        fault = machine.fault
        if run.manner in (Manner.HALF_DONE, Manner.LOSES_NODE):
            machine.power_off()
        else:
            low, high = (90.0, 150.0) if run.manner is Manner.SLOW else (3.0, 20.0)
            is_new = run.verb == "replace" and run.manner is not Manner.SICK_AGAIN
            machine.boot(self._random.uniform(low, high), replaced=is_new)
            if run.manner is Manner.SICK_AGAIN:
                machine.fault = fault
        code = 1 if run.manner is Manner.HALF_DONE else 0
        self._schedule.after(seconds, self._exit, run, code)

    def _exit(self, run: SimRun, code: int) -> None:
        if not run.lives:
            return
        run.lives = False
        if not run.directory.exists():
            if self._random.random() < 0.5:
                # The directory of all runs is gone as well.
                run.ended_unseen = self._schedule.now
                return
            run.directory.mkdir()
        if not self.full:
            (run.directory / OUTPUT).write_text(f"{run.manner.name.lower()}\n")
        write_in_place(run.directory / RESULT, f"{code}\n")
