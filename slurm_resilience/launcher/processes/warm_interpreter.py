"""The launcher's side of the node's warm interpreter (fork_server.py): started, asked, given up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.launcher.processes.children import Children
from slurm_resilience.launcher.processes.process import Process, ProcessSpec, may_renice
from slurm_resilience.launcher.processes.standbys import (
    DEATHS,
    FIRST_PAUSE_SECONDS,
    NICE,
    PAUSE_SECONDS,
)
from slurm_resilience.launcher.program_traits import ProgramTraits
from slurm_resilience.launcher.warm_policy import (
    WarmPlan,
    doubt_of_changes,
    doubt_of_environment,
    doubt_of_neighbours,
)
from slurm_resilience.mesh.rendezvous import HOLD_SECONDS

_HOLD_LOOK_SECONDS = 0.05
_MODULE_ENDS = (".py", "/__main__.py")


class Warmth(Enum):
    """ABSENT → IMPORTING → READY, and back to ABSENT when it dies; UNFIT for good."""

    ABSENT = "there is none yet"
    IMPORTING = "it is still importing"
    READY = "ready"
    UNFIT = "there is none any more"


class WarmSpec(msgspec.Struct, frozen=True):
    """The warm interpreter that a node is to have."""

    plan: WarmPlan
    modules: tuple[str, ...] = ()
    """It imports these."""
    traits: ProgramTraits = ProgramTraits()
    """The program's."""
    front: Path | None = None
    """The directory that comes first in the program's `sys.path`; None: none does."""
    hold: Path | None = None
    """Prepared for a node that may be lost: nothing is started before this file is there. It has
    the variables as they are by then; None: begin at once."""


class _Report(msgspec.Struct, frozen=True):
    """The first words of the interpreter."""

    warm: tuple[str, ...] = ()
    unsafe: str = ""
    reads: frozenset[str] = frozenset()
    loaded: dict[str, str] = {}
    """Module → the directory that it comes from."""


class WarmInterpreter:
    """Keeps one warm interpreter, and has new processes forked there.

    Args:
        loop: the event loop.
        children: starts and buries processes.
        environment: the ranks' common one.
        spec: what it shall be.
        say: prints a line for people.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        children: Children,
        environment: Mapping[str, str],
        spec: WarmSpec,
        say: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._children = children
        self._environment = environment
        self._spec = spec
        self._say = say
        self._nice = NICE if spec.plan.wanted and may_renice() else 0
        self._server: Process | None = None
        self._report = _Report()
        self._warmth = Warmth.ABSENT if spec.plan.wanted else Warmth.UNFIT
        self._doubt = spec.plan.doubt
        """The reason why it is unfit."""
        self._told: set[str] = set()
        self._deaths = 0
        self._timer: asyncio.TimerHandle | None = None
        self.changed: dict[str, str] = {}
        """Variables that are others than when this launcher was started."""

    def soon(self, first: bool = False) -> None:
        """Start it if it is absent, at a moment that disturbs no rank."""
        if self._warmth is Warmth.ABSENT and self._timer is None:
            pause = 0.0 if self._nice else FIRST_PAUSE_SECONDS if first else PAUSE_SECONDS
            self._timer = self._loop.call_later(pause, self._start)

    async def wait_until_needed(self, goes_on: Callable[[], bool]) -> bool:
        """Import, and wait for the file, where there is one to wait for; then the node may begin.

        Args:
            goes_on: tells whether the launcher is not to end.

        Returns:
            Whether it is needed.
        """
        file = self._spec.hold
        if file is None:
            return True
        if self._warmth is Warmth.ABSENT:
            self._start()  # it disturbs no rank of this node: there is none yet
        until, told = self._loop.time() + HOLD_SECONDS, False
        while goes_on() and not (told and self._warmth is not Warmth.IMPORTING):
            if not told:
                told = self._read(file)
            if not told and self._loop.time() > until:
                return False
            await asyncio.sleep(_HOLD_LOOK_SECONDS)
        return told

    def _read(self, file: Path) -> bool:
        try:
            told = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return False
        own = self._environment
        self.changed = {k: v for k, v in told.items() if own.get(k) != v}
        return True

    def fork(self, order: ProcessSpec, piped: bool) -> Process | None:
        """Make a process for an order; None: it has to be started cold, and a line says why."""
        if self._server is not None and self._warmth is Warmth.IMPORTING:
            for word in self._server.hear():  # it may have reported at this very moment
                self.told(self._server, word)
        doubt = self._doubt_of(order)
        if not doubt and self._server is not None:
            try:
                return self._children.fork(self._server, piped)
            except OSError as error:
                doubt = error.strerror or str(error)
                self._give_up(doubt)
        if doubt and doubt not in self._told:
            self._told.add(doubt)
            self._say(f"note: no start from a warm interpreter: {doubt}")
        return None

    def told(self, process: Process, word: Mapping[str, Any]) -> bool:
        """Take a message. Returns whether it came from the interpreter."""
        if process is not self._server:
            return False
        self._report = msgspec.convert(word, _Report)
        if self._report.unsafe:
            self._give_up(self._report.unsafe)
        else:
            self._warmth, self._deaths = Warmth.READY, 0
        return True

    def died(self, process: Process) -> bool:
        """Note the end of a process. Returns whether it was the interpreter."""
        if process is not self._server:
            return False
        self._server = None
        self._deaths += 1
        if self._warmth is not Warmth.UNFIT:
            self._warmth = Warmth.ABSENT
            if self._deaths < DEATHS:
                self._timer = self._loop.call_later(PAUSE_SECONDS, self._start)
            else:
                self._warmth, self._doubt = Warmth.UNFIT, f"it ended {DEATHS} times in a row"
        return True

    def dismiss(self) -> None:
        """End it, for good."""
        self._warmth = Warmth.UNFIT
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            server.signal(signal.SIGKILL)
            self._children.bury(server)

    def _start(self) -> None:
        self._timer = None
        try:
            self._server = self._children.start_server(
                self._environment, self._spec.modules, self._nice
            )
        except OSError as error:
            self._give_up(error.strerror or str(error))
        else:
            self._warmth = Warmth.IMPORTING

    def _give_up(self, doubt: str) -> None:
        self._warmth, self._doubt = Warmth.UNFIT, doubt
        if self._server is not None:
            self._server.signal(signal.SIGKILL)  # its end is heard as every process's

    def _doubt_of(self, order: ProcessSpec) -> str:
        if self._warmth is Warmth.UNFIT:
            return self._doubt
        if self._warmth is not Warmth.READY:
            return str(self._warmth.value)
        report = self._report
        return (
            doubt_of_environment(self._environment, order.env, report.reads)
            or doubt_of_changes(self._spec.traits.sets, report.reads)
            or doubt_of_neighbours(
                [name for name, place in report.loaded.items() if Path(place) != self._spec.front],
                _importable(self._spec.front),
            )
        )


def program_front(kind: str, program: str) -> Path | None:
    """Return the directory that comes first in a program's `sys.path`; None: none does.

    Args:
        kind: script, module or program.
        program: the script's path, or the module's name.
    """
    if kind == "program" or sys.flags.safe_path:
        return None
    if kind == "module":
        return Path.cwd()
    path = Path(program).resolve()
    return path if path.is_dir() else path.parent


def program_file(kind: str, program: str) -> Path | None:
    """Return the file of a Python program's first line; None: it is not found without an import.

    Args:
        kind: script or module.
        program: the script's path, or the module's name.
    """
    if kind == "script":
        return Path(program) / "__main__.py" if Path(program).is_dir() else Path(program)
    places = ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    name = program.replace(".", "/")
    files = (Path(place) / f"{name}{end}" for place in places for end in _MODULE_ENDS)
    return next((file for file in files if file.is_file()), None)


def _importable(directory: Path | None) -> set[str]:
    """Return the top-level names that can be imported from a directory."""
    if directory is None:
        return set()
    try:
        entries = list(directory.iterdir())
    except OSError:
        return set()
    files = {entry.name.partition(".")[0] for entry in entries if entry.suffix in (".py", ".so")}
    return files | {entry.name for entry in entries if (entry / "__init__.py").exists()}
