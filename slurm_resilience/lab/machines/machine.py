"""One machine of the lab (the controller's or a node's) as the keeper sees it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from slurm_resilience.errors import LabError
from slurm_resilience.lab import programs
from slurm_resilience.lab.machines.network import Network
from slurm_resilience.lab.machines.processes import Processes, fork_node

CALL_TIMEOUT_SECONDS = 30.0

_CALLS = itertools.count()
"""Numbers for the programs that are called here and waited for."""


class Machine:
    """A set of namespaces with an init of ours as pid 1, or the lack of one when power is off."""

    def __init__(
        self, name: str, number: int, lab: Path, processes: Processes, network: Network | None
    ) -> None:
        self.name = name
        self.directory = lab / "nodes" / name
        self.daemons: dict[str, str] = {}
        """Every program started here by name: ``running`` or how it ended."""
        self.cut = False
        self.root = ""
        """Its root directory; empty: the machine's."""
        self.pid: int | None = None
        self.end: asyncio.Future[int] | None = None
        self._number = number
        self._lab = lab
        self._processes = processes
        self._network = network
        self._env = programs.environment(self._lab)
        self._ends: dict[str, asyncio.Future[int]] = {}
        self._channel: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def powered(self) -> bool:
        """True while it runs at all."""
        return self.pid is not None

    async def boot(self, binds: list[tuple[str, str]]) -> None:
        """Switch it on, up to the point where programs can be started."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            argv = programs.quick("slurm_resilience.lab.machines.init", str(theirs.fileno()))
            pid = fork_node(argv, self._env, theirs.fileno(), self._network is not None)
        self.pid, self.end, self._channel = pid, self._processes.watch(pid), ours
        self.daemons.clear()
        if self._network is not None:
            await self._network.plug(self.name, self._number, pid, connected=not self.cut)
        up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ends = {"": up}
        self._reader = asyncio.create_task(self._listen(ours))
        self._say(hostname=self.name, root=self.root, binds=binds)
        await asyncio.wait({up, self.end}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            raise LabError(f"{self.name} could not boot; see {self._lab / 'log' / 'keeper.log'}")

    async def kill(self) -> None:
        """Cut its power: first the cable, so that nothing it says while dying is heard."""
        if self.pid is None or self.end is None:
            return
        pid, end = self.pid, self.end
        if self._network is not None:
            try:
                await self._network.pull(self.name)
            except LabError:
                # The cable of a node that ended by itself (a reboot, say) goes with its namespace.
                if not end.done():
                    raise
        if not end.done():
            os.kill(pid, signal.SIGKILL)
        await asyncio.shield(end)
        await self.gone()

    async def gone(self) -> None:
        """Tidy up after its end."""
        self.pid = self.end = None
        if self._reader is not None:
            self._reader.cancel()
        if self._channel is not None:
            self._channel.close()
        self._forget()
        if self._network is not None:
            await self._network.unplug(self.name)

    def start(
        self, name: str, argv: list[str], log: Path, env: dict[str, str] | None = None
    ) -> asyncio.Future[int]:
        """Start a program; the future of its exit code."""
        if self.daemons.get(name) == "running":
            raise LabError(f"{name} is running on {self.name} already")
        end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ends[name] = end
        self.daemons[name] = "running"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._say(start=name, argv=argv, env=self._env | (env or {}), log=str(log))
        return end

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a program started here."""
        if self.daemons.get(name) != "running":
            raise LabError(f"{name} does not run on {self.name}; nothing was done")
        self._say(kill=name, signal=number)

    def end_of(self, name: str) -> asyncio.Future[int]:
        """Return the future of the exit code of a program that was started here and runs."""
        return self._ends[name]

    async def wait_end(self, name: str) -> None:
        """Wait until a program started here has ended."""
        end = self._ends.get(name)
        if end is not None:
            await asyncio.wait({end})

    async def call(self, *argv: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Run a program here to its end; its exit code and output."""
        name = f"call-{next(_CALLS)}"
        output = self._lab / "log" / f".{self.name}-{name}"
        try:
            end = self.start(name, list(argv), output, env)
            try:
                code = await asyncio.wait_for(asyncio.shield(end), CALL_TIMEOUT_SECONDS)
            except TimeoutError:
                self.signal(name, signal.SIGKILL)
                raise LabError(
                    f"`{' '.join(argv)}` took more than {CALL_TIMEOUT_SECONDS:.0f} s"
                ) from None
            return code, output.read_text(errors="replace").strip()
        finally:
            self.daemons.pop(name, None)
            output.unlink(missing_ok=True)

    def open_handle(self) -> int:
        """Open a pidfd of its pid 1: with it another process can enter."""
        if self.pid is None:
            raise LabError(f"{self.name} is powered off; `sres lab power-on {self.name}` first")
        return os.pidfd_open(self.pid)

    async def _listen(self, channel: socket.socket) -> None:
        loop, unread = asyncio.get_running_loop(), b""
        while data := await loop.sock_recv(channel, 65536):
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                self._heard(json.loads(line))

    def _heard(self, message: dict[str, Any]) -> None:
        if "up" in message:
            self._ends.pop("").set_result(0)
        elif "exited" in message:
            name, code = message["exited"], message["code"]
            self.daemons[name] = f"exited {code}" if code >= 0 else f"killed by signal {-code}"
            end = self._ends.pop(name, None)
            if end is not None and not end.done():
                end.set_result(code)

    def _say(self, **order: Any) -> None:
        if self._channel is None or not self.powered:
            raise LabError(f"{self.name} is powered off; `sres lab power-on {self.name}` first")
        # Orders are small and the init always listens: a full socket would be a dead init.
        self._channel.sendall(json.dumps(order).encode() + b"\n")

    def _forget(self) -> None:
        for end in self._ends.values():
            if not end.done():
                end.set_result(-signal.SIGKILL)
        self._ends.clear()
        self.daemons.clear()
