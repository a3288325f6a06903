"""Launchers that are forked from a process which has imported torch: they, and their ranks, need
not import it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FORKING = Path(__file__).parent / "programs" / "forking.py"
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
LIMIT_SECONDS = 200.0
"""A launcher that takes longer hangs."""


def _below(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:  # it has ended
        return []
    children = [int(word) for word in text.split()]
    return [*children, *(one for child in children for one in _below(child))]


class Forked:
    """The part of `subprocess.Popen` that tests need of a launcher; programs/forking.py forks
    it."""

    def __init__(self, door: str, **order: Any) -> None:
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(door)
        self._link.sendall(json.dumps(order).encode() + b"\n")
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self._link.settimeout(max(timeout, 0.001))
            try:
                self.returncode = int(self._link.recv(64) or -9)
            except TimeoutError:
                raise subprocess.TimeoutExpired("launcher", timeout) from None
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def kill(self) -> None:
        self._link.shutdown(socket.SHUT_WR)


class WarmMachine:
    """This machine, and a process on it that launchers are forked from.

    Args:
        folder: for the socket.
        name: of the machine.
        modules: what it imports besides torch.
    """

    def __init__(self, folder: Path, name: str = "here", modules: Sequence[str] = ()) -> None:
        self.door = f"{folder}/{name}"
        self._process = self._start([sys.executable, str(FORKING), self.door, *modules])

    def launch(self, argv: Sequence[str], env: dict[str, str], **more: str) -> Forked:
        """Start a launcher.

        Args:
            argv: its arguments.
            env: added to its environment.
            more: the files that take its output, ``out`` and ``err``, and its directory, ``cwd``.
        """
        deadline = time.monotonic() + 120
        while not Path(self.door).exists():
            assert self._process.poll() is None and time.monotonic() < deadline, self.door
            time.sleep(0.05)
        return Forked(self.door, argv=list(argv), env=self._environment(env), **more)

    def run(
        self, argv: Sequence[str], env: dict[str, str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a launcher to its end. Its output is kept in files of ``TMPDIR``, which `env` has."""
        place = Path(env["TMPDIR"]) / f"said-{os.urandom(4).hex()}"
        place.mkdir()
        out, err = place / "out", place / "err"
        launched = self.launch(argv, env, out=str(out), err=str(err), cwd=str(cwd))
        try:
            code = launched.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired as hangs:
            self.show_stacks()
            launched.kill()
            shown = [file.read_text(errors="replace")[-6000:] for file in (out, err)]
            raise AssertionError("it hangs:\n" + "\n".join(shown)) from hangs
        texts = [file.read_text(errors="replace") for file in (out, err)]
        return subprocess.CompletedProcess(list(argv), code, *texts)

    def show_stacks(self) -> None:
        """Have every process that was forked write its threads' stacks to its stderr. A process
        that has become another program ends by it."""
        for pid in _below(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGRTMAX)
        time.sleep(1.0)  # no state tells when all have written

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=os.environ | QUIET, text=True)

    def _environment(self, env: dict[str, str]) -> dict[str, str]:
        # Nothing of the caller's own training or job is inherited.
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
        return own | env

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10)
