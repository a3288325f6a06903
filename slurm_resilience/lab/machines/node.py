"""A node of the lab over its life: power, boots, lifecycle scripts, instances."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import stat
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from slurm_resilience.errors import LabError
from slurm_resilience.lab import programs
from slurm_resilience.lab.machines.machine import Machine
from slurm_resilience.lab.machines.network import Network
from slurm_resilience.lab.machines.processes import Processes
from slurm_resilience.lab.spec import LabSpec

DISK = Path("/run/sres-node")
LIFECYCLE_FOLDERS = ("--state", str(DISK / "lifecycle"), "--logs", str(DISK / "lifecycle/log"))
# slurmctld compares boot times in whole seconds: a shorter time off goes unnoticed, and the node
# hangs in its REBOOT state.
SHORTEST_OFF_SECONDS = 2.0
SLURMD_START_SECONDS = 20.0
NVIDIA_MAJOR = 195


class LabNode(Machine):
    """A node: off, booting, joined (slurmd runs), or failed (its scripts or slurmd did)."""

    def __init__(
        self,
        number: int,
        lab: Path,
        spec: LabSpec,
        processes: Processes,
        network: Network | None,
    ) -> None:
        name = f"n{number}"
        super().__init__(name, number, lab, processes, network)
        self.state, self.why, self.instance, self.boots = "off", "never switched on", "", 0
        self._spec = spec
        self._off_since = 0.0
        self._work: asyncio.Task[None] | None = None
        self._kind = ""
        self.disk = self.directory / "disk"
        self.log = self.directory / "log"
        self.log.mkdir(parents=True)
        self._kmsg = self.directory / "kmsg"
        os.mkfifo(self._kmsg, 0o600)
        # Held open for reading and writing, so that neither side ever waits for the other.
        self._kmsg_fd = os.open(self._kmsg, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    async def power_on(self) -> None:
        """Start it again as it was; its disk is kept."""
        if self.powered:
            raise LabError(f"{self.name} is powered on already; nothing was done")
        await self._do("power-on", self._come_up())

    async def power_off(self) -> None:
        """Pull the plug."""
        if not self.powered and self._work is None:
            raise LabError(f"{self.name} is powered off already; nothing was done")
        await self._abandon_work()
        await self._go_down("power was cut")

    async def reboot(self) -> None:
        """Off, and on again."""
        await self._do("reboot", self._cycle("rebooting", fresh=False))

    async def replace(self) -> None:
        """Throw the node and its disk away; another one takes its name."""
        await self._do("replace", self._cycle("being replaced", fresh=True))

    async def _do(self, kind: str, work: Coroutine[Any, Any, None]) -> None:
        if self._work is not None and self._kind == kind:
            # Asked twice is done once.
            work.close()
        else:
            await self._abandon_work()
            self._kind, self._work = kind, asyncio.create_task(work)
            self._work.add_done_callback(self._work_done)
        task = self._work
        await asyncio.wait({task})
        if task.cancelled():
            raise LabError(f"{self.name}: the {kind} was interrupted by another order")
        task.result()
        if self.state != "joined":
            raise LabError(f"{self.name} did not join: {self.why}")

    def _work_done(self, task: asyncio.Task[None]) -> None:
        if self._work is task:
            self._work = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self.state, self.why = "failed", str(error)

    async def _abandon_work(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
            self._work = None

    async def _cycle(self, why: str, fresh: bool) -> None:
        if self.powered:
            await self._go_down(why)
        if fresh:
            shutil.rmtree(self.disk, ignore_errors=True)
            self.cut = False
        await self._come_up()

    async def _go_down(self, why: str) -> None:
        self.state, self.why = "off", why
        await self.kill()
        self._off_since = time.monotonic()

    async def _come_up(self) -> None:
        self.state, self.why = "booting", "waits for its power to settle"
        await asyncio.sleep(max(0.0, self._off_since + SHORTEST_OFF_SECONDS - time.monotonic()))
        self._drain_kernel_log()
        if not self.disk.exists():
            self._provision()
        (self.disk / "slurmd.pid").unlink(missing_ok=True)
        await self.boot(
            [
                (str(self.disk), str(DISK)),
                (str(self._kmsg), str(DISK / "kmsg")),
                (str(self.directory / "hostname"), "/etc/hostname"),
            ]
        )
        self.boots += 1
        assert self.end is not None
        self.end.add_done_callback(self._ended)
        await self._join()

    async def _join(self) -> None:
        scripts = self._spec.lifecycle_directory()
        if scripts is not None:
            self.why = f"runs the lifecycle scripts of {scripts}"
            said = self.log / "lifecycle-runner.log"
            said.unlink(missing_ok=True)
            if await self.start("lifecycle", self._lifecycle_command(scripts), said):
                lines = said.read_text(errors="replace").strip().splitlines()
                last = lines[-1] if lines else f"the lifecycle runner failed; see {said}"
                self._fail(last.removeprefix("sres-lifecycle: error: "))
                # It says why the node does not join.
                if self._spec.daemons:
                    self.start_daemon("sresd")
                return
        if await self._start_slurmd() and self._spec.daemons:
            self.start_daemon("sresd")

    def _lifecycle_command(self, scripts: Path) -> list[str]:
        words = ["--dir", str(scripts), *LIFECYCLE_FOLDERS, self.name]
        if (scripts / "on_create.sh").exists():
            # Its runner asks Slurm, and needs more than the standard library.
            return [sys.executable, "-P", "-m", "slurm_resilience.lifecycle", *words]
        return programs.quick("slurm_resilience.lifecycle.main", *words)

    async def join(self) -> None:
        """Start slurmd on a node whose scripts had failed, and have ended well by now."""
        if self.state == "joined":
            return
        if not self.powered or self._work is not None:
            raise LabError(f"{self.name} is {self.state}: {self.why}; nothing was done")
        if not await self._start_slurmd():
            raise LabError(f"{self.name} did not join: {self.why}")

    async def _start_slurmd(self) -> bool:
        self.why = "waits for slurmd"
        end = self.start_daemon("slurmd")
        deadline = time.monotonic() + SLURMD_START_SECONDS
        while not (self.disk / "slurmd.pid").exists():
            if end.done() or time.monotonic() > deadline:
                self._fail(f"slurmd did not start; see {self.log / 'slurmd.log'}")
                return False
            await asyncio.sleep(0.01)
        self.state, self.why = "joined", ""
        return True

    def start_daemon(self, name: str) -> asyncio.Future[int]:
        """Start slurmd or sresd."""
        path = programs.find(name, self.root)
        if path is None:
            raise LabError(f"{name} is not installed")
        argv = {"slurmd": [path, "-D", "-N", self.name], "sresd": [path]}[name]
        log = self.log / ("slurmd.out" if name == "slurmd" else f"{name}.log")
        return self.start(name, argv, log)

    def _fail(self, why: str) -> None:
        self.state, self.why = "failed", why
        with (self.log / "node.log").open("a", encoding="utf-8") as log:
            log.write(f"{self.name} does not join: {why}\n")

    def _ended(self, end: asyncio.Future[int]) -> None:
        # Its own doing: a caller who cuts the power has set the state before.
        if self.state == "off" or self.end is not end:
            return
        if end.result() == -signal.SIGHUP:
            asyncio.get_running_loop().create_task(self._reboot_itself())
        else:
            asyncio.get_running_loop().create_task(self._die(end.result()))

    async def _reboot_itself(self) -> None:
        with contextlib.suppress(LabError):
            await self._do("reboot", self._cycle("rebooted itself", fresh=False))

    async def _die(self, code: int) -> None:
        await self._abandon_work()
        await self._go_down(f"its pid 1 ended by itself (exit code {code})")

    def _provision(self) -> None:
        (self.disk / "spool").mkdir(parents=True)
        (self.disk / "dev").mkdir()
        (self.disk / "kmsg").touch()
        (self.directory / "hostname").write_text(f"{self.name}\n")
        self.instance = f"i-{secrets.token_hex(6)}"
        (self.disk / "instance-id").write_text(f"{self.instance}\n")
        if self._spec.gres_parts is not None:
            # Slurm sets CUDA_VISIBLE_DEVICES for character devices only; no program opens these.
            for index in range(self._spec.gres_parts[2]):
                device = os.makedev(NVIDIA_MAJOR, index)
                os.mknod(self.disk / "dev" / f"nvidia{index}", stat.S_IFCHR | 0o666, device)

    def describe(self) -> dict[str, Any]:
        """For people and for the API."""
        return {
            "state": self.state,
            "why": self.why,
            "instance": self.instance,
            "boots": self.boots,
            "cable": "cut" if self.cut else "in place",
            "daemons": dict(self.daemons),
        }

    def _drain_kernel_log(self) -> None:
        """Drop what the last boot's kernel said, so that the next one does not say it again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._kmsg_fd, 65536):
                pass
