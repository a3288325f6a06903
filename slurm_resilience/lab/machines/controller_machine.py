"""A controller's machine of the lab: slurmctld and sresctld, and with a backup two of them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from slurm_resilience.errors import LabError, MissingTool
from slurm_resilience.lab import programs
from slurm_resilience.lab.machines.machine import Machine
from slurm_resilience.lab.machines.network import Network
from slurm_resilience.lab.machines.processes import Processes

BACKUP = "ctl2"
OWN_DIRECTORIES = ("sresctld", "run")
"""Below the directory of `ctl`: each controller has them on a disk of its own. All else is shared,
as Slurm wants it (StateSaveLocation)."""


class ControllerMachine(Machine):
    """The machine of the primary (`ctl`), or of the backup (`ctl2`)."""

    def __init__(
        self, name: str, number: int, lab: Path, processes: Processes, network: Network | None
    ) -> None:
        super().__init__(name, number, lab, processes, network)
        self.directory = lab / name
        self._logs = lab / "log"
        self._tasks: set[asyncio.Future[None]] = set()
        self._is_backup = name == BACKUP
        self._primary_directory = lab / "ctl"

    async def come_up(self) -> None:
        """Switch it on, up to the point where daemons can be started."""
        binds = []
        if self._is_backup:
            for part in OWN_DIRECTORIES:
                own = self.directory / part
                own.mkdir(parents=True, exist_ok=True)
                binds.append((str(own), str(self._primary_directory / part)))
        await self.boot(binds)
        assert self.end is not None
        self.end.add_done_callback(self._ended)

    async def power_on(self) -> None:
        """Start it again; its daemons are started one by one, like those of a real machine."""
        if self.powered:
            raise LabError(f"{self.name} is powered on already; nothing was done")
        await self.come_up()

    async def power_off(self) -> None:
        """Pull the plug."""
        if not self.powered:
            raise LabError(f"{self.name} is powered off already; nothing was done")
        await self.kill()

    def start_daemon(self, name: str) -> asyncio.Future[int]:
        """Start slurmctld, slurmdbd or sresctld."""
        path = programs.find(name, self.root)
        if path is None:
            raise MissingTool(f"{name} is not installed")
        argv, out = [path], f"{name}{self._suffix}.log"
        if name.startswith("slurm"):
            argv.append("-D")
            out = f"{name}{self._suffix}.out"
            if self._is_backup:
                argv += ["-L", str(self._logs / f"{name}{self._suffix}.log")]
        return self.start(name, argv, self._logs / out)

    def describe(self) -> dict[str, Any]:
        """For people and for the API."""
        return {
            "state": "on" if self.powered else "off",
            "cable": "cut" if self.cut else "in place",
            "daemons": dict(self.daemons),
        }

    @property
    def _suffix(self) -> str:
        return "2" if self._is_backup else ""

    def _ended(self, end: asyncio.Future[int]) -> None:
        if self.end is end:
            task = asyncio.ensure_future(self._tidy())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tidy(self) -> None:
        with contextlib.suppress(LabError):
            await self.gone()
