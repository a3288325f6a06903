"""Starts the ranks of one run, harms one of them, and reads what they wrote."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import psutil
from figures import Event, parse, past

HERE = Path(__file__).resolve().parent
WORLD = 4
VICTIM = 2
"""Not rank 0: its store's end would be the end of nvidia-resiliency-ext's run."""
WARM_STEP = 15
"""Steps before the fault: what happens once (imports, buckets, caches) has happened."""
_TICK = 0.02
_nap = threading.Event()
_T = TypeVar("_T")


class RunFailed(Exception):
    """A run that gives no figure, and why."""


class Job:
    """One run: its directory, its processes, its time limit.

    Args:
        limit: seconds for the whole run.
    """

    def __init__(self, limit: float) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="sres-bench-")
        self.directory = Path(self._place.name)
        self._mark = f"BENCH_MARK={uuid.uuid4()}"
        self._deadline = time.monotonic() + limit
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._place.cleanup()

    def start(self, argv: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start one process in the background; what it says goes to the run's directory."""
        name, value = self._mark.split("=")
        known = {
            **os.environ,
            "BENCH_DIR": str(self.directory),
            "PYTHONPATH": str(HERE / "workers"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            # The same way for every rank; a host name costs a look-up.
            "GLOO_SOCKET_IFNAME": "lo",
            name: value,
            **environment,
        }
        with (self.directory / f"output{len(self._children)}").open("wb") as output:
            child = subprocess.Popen(
                list(argv),
                env=known,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def ranks(self) -> dict[int, list[Event]]:
        """Return the events that every rank has written so far."""
        return {
            int(file.name[4:].split(".")[0]): parse(file.read_text())
            for file in self.directory.glob("rank*.events")
        }

    def until(self, ready: Callable[[Mapping[int, list[Event]]], _T | None], what: str) -> _T:
        """Read the ranks' files until ``ready`` has an answer.

        Raises:
            RunFailed: the run's time is over, or everything it started has ended.
        """
        while True:
            # Before the look: those that have ended have written all.
            alive = any(child.poll() is None for child in self._children)
            found = ready(self.ranks())
            if found is not None:
                return found
            if not alive or time.monotonic() > self._deadline:
                why = "its time is over" if alive else "all processes have ended"
                raise RunFailed(f"no {what}: {why}{self._last_words()}")
            _nap.wait(_TICK)

    def warm(self) -> None:
        """Wait until every rank has made `WARM_STEP` steps."""
        self.until(lambda ranks: past(ranks, range(WORLD), WARM_STEP) or None, "first steps")

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to the process that sits on a rank; when that was."""
        pid = self.ranks()[rank][-1].pid
        at = time.monotonic()
        os.kill(pid, number)
        return at

    def make_raise(self, rank: int) -> float:
        """Let a rank raise inside of its next step; when it did."""
        before = time.monotonic()
        (self.directory / f"raise{rank}").touch()

        def raised(ranks: Mapping[int, list[Event]]) -> float | None:
            times = [e.at for e in ranks[rank] if e.name == "fault" and e.at > before]
            return times[0] if times else None

        return self.until(raised, "exception")

    def _last_words(self) -> str:
        lines = []
        for file in sorted(self.directory.glob("output*")):
            said = file.read_text(errors="replace").strip().splitlines()
            lines += [f"\n    | {line[:160]}" for line in said[-3:]]
        return "".join(lines[-12:])

    def _end(self) -> None:
        """End what this run started, also what left its parent: it carries the run's mark."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
        # A killed process may have started one more before: until none is left.
        deadline = time.monotonic() + 10
        while (left := self._marked()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        for child in self._children:
            child.wait(10)

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                ours = self._mark.encode() in environment.split(b"\0")
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
