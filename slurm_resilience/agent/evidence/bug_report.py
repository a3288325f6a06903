"""Have NVIDIA's own tool write its report of the node's GPUs, beside everything else.

It takes minutes and writes megabytes, and may hang as the driver does. So it is a process of its
own with limits in time and size, one at a time; the evidence says where its file lies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import threading
import time
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.agent.evidence.machine_tools import run_tool
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.trusted_paths import refuse_users

log = logging.getLogger("sresd.bug_report")

KEPT_REPORTS = 3
FRESH_SECONDS = 600.0
"""A report that is younger is not made anew: one incident asks several times."""
COPY_SECONDS = 60.0
NICENESS = 10
FOLDER = "bug-reports"
SUFFIXES = (".log", ".log.gz")
"""The tool packs what it writes, and puts `.gz` behind the name that it is given."""


class ReportState(StrEnum):
    """The state of a report."""

    ABSENT = "absent"
    """This node has no such tool, or it is switched off."""
    RUNNING = "running"
    ENDED = "ended"


class ReportProgress(NamedTuple):
    """The state of the newest report, in words too."""

    state: ReportState
    text: str = ""


class BugReports:
    """Runs the tool. Its methods may be called from any thread, and wait for nothing."""

    def __init__(self, settings: Config, node: str, clock: Clock) -> None:
        """
        Args:
            settings: of sresd; the reports lie in lifecycle.state_dir.
            node: its name goes into that of a file.
            clock: of this machine.
        """
        self._program = settings.agent.bug_report
        self._seconds = settings.agent.bug_report_timeout
        self._max_bytes = settings.agent.bug_report_bytes
        self._folder = Path(settings.lifecycle.state_dir) / FOLDER
        self._shared = settings.replace.evidence_directory
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._work: threading.Thread | None = None
        self._began: float | None = None
        self._ended = ""

    def begin(self) -> ReportProgress:
        """Begin a report, unless one is under way or has just ended; return its state."""
        with self._lock:
            path = shutil.which(self._program) if self._program and self._seconds else None
            is_fresh = (
                self._began is not None and self._clock.monotonic() - self._began < FRESH_SECONDS
            )
            if path is not None and not self._runs() and not is_fresh:
                work = threading.Thread(
                    target=self._run, args=(path,), name="bug_report", daemon=True
                )
                try:
                    work.start()
                except RuntimeError as error:
                    log.warning("%s cannot be run: %s", path, error)
                else:
                    self._began, self._work = self._clock.monotonic(), work
        return self.progress()

    def progress(self) -> ReportProgress:
        """Return the state of the newest report."""
        if self._began is None:
            return ReportProgress(ReportState.ABSENT)
        if self._runs():
            since = self._clock.monotonic() - self._began
            text = f"{self._program} runs since {since:.0f} s; {self._folder} gets its file"
            return ReportProgress(ReportState.RUNNING, text)
        return ReportProgress(ReportState.ENDED, self._ended)

    def wait(self, seconds: float) -> ReportProgress:
        """Wait for the end of a report that is under way.

        Args:
            seconds: at most.
        """
        work = self._work
        if work is not None:
            work.join(seconds)
        return self.progress()

    def _runs(self) -> bool:
        return self._work is not None and self._work.is_alive()

    def _run(self, program: str) -> None:
        try:
            self._ended = self._report(program)
        except OSError as error:
            self._ended = f"none: {error.strerror or error}"
        log.info("%s: %s", self._program, self._ended)

    def _report(self, program: str) -> str:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_users(self._folder)
        self._prune(KEPT_REPORTS - 1)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._clock.now()))
        target = self._folder / f"{self._node}-{stamp}{SUFFIXES[0]}"
        end = self._run_tool([program, "--safe-mode", "--output-file", str(target)])
        found = self._newest(target)
        if found is None:
            return f"none: {self._program} {end}, and wrote no file"
        size = found.stat().st_size
        end += ", cut off" if size >= self._max_bytes else ""
        text = f"{found} ({size} bytes; {end})"
        return f"{text}; {self._copy(found)}" if self._shared else text

    def _run_tool(self, words: list[str]) -> str:
        """Run the tool within its limits; return how it ended, in words."""
        limits = ["prlimit", f"--fsize={self._max_bytes}", "nice", "-n", str(NICENESS)]
        child = subprocess.Popen(
            [*limits, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            start_new_session=True,
            umask=0o077,
        )
        try:
            code = child.wait(self._seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            # One that cannot be killed keeps this thread, and none is started beside it.
            child.wait()
            return f"killed after {self._seconds:g} s"
        return f"ended with {code}"

    def _newest(self, target: Path) -> Path | None:
        names = [target.with_suffix(suffix) for suffix in SUFFIXES]
        with contextlib.suppress(OSError):
            for path in names:
                if path.exists() and stat.S_ISREG(path.lstat().st_mode):
                    return path
        return None

    def _prune(self, kept: int) -> None:
        """Remove all reports but the newest."""
        files = sorted(self._folder.glob(f"*{SUFFIXES[0]}*"), key=lambda path: path.name)
        for path in files[: max(0, len(files) - kept)]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _copy(self, found: Path) -> str:
        """Copy a report to where the site wants it, which may be on a file server that is dead."""
        target = Path(self._shared) / found.name
        # A name that no user can have made a link of.
        new = target.with_name(f".{found.name}.{secrets.token_hex(8)}")
        steps = (("cp", "--", str(found), str(new)), ("mv", "-fT", "--", str(new), str(target)))
        for words in steps:
            end = run_tool(words, COPY_SECONDS)
            if end is None:
                return f"not copied to {self._shared}: no answer within {COPY_SECONDS:g} s"
            if end.code:
                return f"not copied to {self._shared}: {end.text.strip()[:200]}"
        return f"copied to {target}"
