"""MariaDB for slurmdbd: its own data, its own socket, no network."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from slurm_resilience.errors import LabError, MissingTool
from slurm_resilience.lab import programs
from slurm_resilience.lab.machines.processes import Processes

START_TIMEOUT_SECONDS = 60.0


class Database:
    """The lab's mariadbd."""

    def __init__(self, lab: Path, processes: Processes) -> None:
        self._directory = lab / "mysql"
        self._data = self._directory / "data"
        self._socket = self._directory / "mysqld.sock"
        self._log = lab / "log" / "mariadb.log"
        self._processes = processes

    def make_directory(self) -> None:
        """Before the lab's mounts are made: this one is shown at /run/mysqld.

        That is where slurmdbd's client library looks for "localhost".
        """
        self._data.mkdir(parents=True)

    async def start(self) -> None:
        """Make the system tables and start it."""
        install, daemon = (programs.find(p) for p in ("mariadb-install-db", "mariadbd"))
        if install is None or daemon is None:
            raise MissingTool("MariaDB is not installed; `apt install mariadb-server`")
        common = ["--no-defaults", f"--datadir={self._data}", "--user=root"]
        made = await self._processes.run(
            [install, *common, "--auth-root-authentication-method=normal", "--skip-test-db"],
            self._log,
        )
        if made != 0:
            raise LabError(f"mariadb-install-db failed; see {self._log}")
        _, end = self._processes.start(
            [
                daemon, *common, "--skip-networking", f"--socket={self._socket}",
                f"--pid-file={self._directory / 'mariadbd.pid'}",
                # Nothing here has to survive a crash.
                "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900",
                "--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M",
            ],
            self._log,
        )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._socket.exists():
            if end.done() or time.monotonic() > deadline:
                raise LabError(f"mariadbd did not start; see {self._log}")
            await asyncio.sleep(0.02)
