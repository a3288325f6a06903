"""Keep the node's state where Slurm's prolog, epilog and HealthCheckProgram read it.

They must end within milliseconds and can wait for no answer: so they read a small file, and ask for
checks by writing to another one. The file has the time at which it was written: with a sresd that
hangs or is gone it grows old, and the hook does what its site chose for that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import Clock
from slurm_resilience.config import AgentSettings
from slurm_resilience.health.verdict import VERDICTS, HealthVerdict, verdict_of
from slurm_resilience.trusted_paths import refuse_users

log = logging.getLogger("sresd.hooks")

STATE_NAME, WANTED_NAME = "state", "wanted"
LOOK_SECONDS = 1.0
"""Between two looks at the outbox, and at what hooks ask for."""
WRITE_SECONDS = 5.0
"""The state is written anew after this time: a hook takes one that is much older for unknown."""
CHECK_PAUSE_SECONDS = 10.0
"""Between two runs of the checks for hooks: short jobs end many times a second."""
CHECK_SECONDS = 60.0
TEXT_CHARACTERS = 200


def hook_directory(settings: AgentSettings, environ: dict[str, str]) -> Path | None:
    """Return the directory that hooks read; None: there is none.

    Args:
        settings: agent.hook_directory.
        environ: systemd names the directory of its runtime files there.
    """
    if settings.hook_directory:
        return Path(settings.hook_directory)
    folder = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(folder) if folder else None


class HookState:
    """Writes the state, and has the checks run that a hook asks for. `run` is a thread."""

    def __init__(
        self,
        directory: Path,
        outbox: Outbox,
        check: Callable[[float], object],
        clock: Clock,
        stop: threading.Event,
        uptime: Path = Path("/proc/uptime"),
    ) -> None:
        """
        Args:
            directory: where the files are; root's alone to write.
            outbox: knows what is wrong with this node.
            check: runs the checks that may take the node out of service, within some seconds.
            clock: of this machine.
            stop: ends it.
            uptime: tells the seconds since the boot, as hooks read them.
        """
        self._directory = directory
        self._outbox = outbox
        self._check = check
        self._clock = clock
        self._stop = stop
        self._uptime = uptime
        self._written = ""
        self._due = clock.monotonic()
        self._wanted = self._mark()
        self._check_due = clock.monotonic()
        self._checking: threading.Thread | None = None
        self._told_trouble = ""

    def run(self) -> None:
        """Run the thread."""
        while not self._stop.is_set():
            self.look()
            self._clock.wait(self._stop, LOOK_SECONDS)

    def look(self) -> None:
        """Write the state when it has changed or grows old; begin checks that were asked for."""
        now = self._clock.monotonic()
        state = self._state()
        if state != self._written or now >= self._due:
            self._write(state)
            self._due = now + WRITE_SECONDS
        mark = self._mark()
        is_free = self._checking is None or not self._checking.is_alive()
        if mark != self._wanted and is_free and now >= self._check_due:
            self._check_due = now + CHECK_PAUSE_SECONDS
            # Beside this thread: a check that hangs must not let the state grow old.
            checking = threading.Thread(
                target=self._check, args=(CHECK_SECONDS,), name="hook checks", daemon=True
            )
            try:
                checking.start()
            except RuntimeError as error:
                log.warning("the checks for hooks cannot be run: %s", error)  # later, then
            else:
                self._wanted, self._checking = mark, checking

    def _state(self) -> str:
        findings = self._outbox.holding()
        worst = max(
            findings, key=lambda one: VERDICTS.index(verdict_of(one.severity)), default=None
        )
        if worst is not None:
            return f"verdict {verdict_of(worst.severity)}\ntext {_one_line(worst.text)}\n"
        # Before the first result: has any check looked?
        verdict = HealthVerdict.HEALTHY if self._outbox.results() else HealthVerdict.UNJUDGED
        return f"verdict {verdict}\ntext \n"

    def _write(self, state: str) -> None:
        new = self._directory / f"{STATE_NAME}.new"
        try:
            seconds = self._uptime.read_text("ascii").partition(".")[0]
            self._directory.mkdir(mode=0o755, exist_ok=True)
            refuse_users(self._directory)
            # The last line tells a reader that it has all of them.
            new.write_text(f"{state}uptime {seconds}\n", "utf-8")
            new.replace(self._directory / STATE_NAME)
        except OSError as error:
            # An old state tells hooks as much; each trouble is said once.
            if str(error) != self._told_trouble:
                log.warning("the state for Slurm's hooks cannot be written: %s", error)
            self._told_trouble = str(error)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            return
        self._written, self._told_trouble = state, ""

    def _mark(self) -> int:
        """Return the time at which a hook last asked; 0: never."""
        try:
            return (self._directory / WANTED_NAME).stat().st_mtime_ns
        except OSError:
            return 0


def _one_line(text: str) -> str:
    plain = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(plain.split())[:TEXT_CHARACTERS]
