"""Everything a lab consists of, and the order in which it starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience.errors import LabError, MissingTool, NotFound, UsageError
from slurm_resilience.lab import conf, programs, world
from slurm_resilience.lab.database import Database
from slurm_resilience.lab.machines import network, rootfs
from slurm_resilience.lab.machines.controller_machine import BACKUP, ControllerMachine
from slurm_resilience.lab.machines.machine import Machine
from slurm_resilience.lab.machines.node import LabNode
from slurm_resilience.lab.machines.processes import Processes
from slurm_resilience.lab.ports import reserve
from slurm_resilience.lab.spec import LabSpec

ANSWER_TIMEOUT_SECONDS = 60.0
# A node that did not register by then will not.
IDLE_TIMEOUT_SECONDS = 60.0
DAEMONS = ("slurmctld", "slurmdbd", "sresctld", "slurmd", "sresd")
SRESD_RUNS = "watches node"
"""In the log line with which sresd begins its work."""


class LabCluster:
    """The running lab."""

    def __init__(
        self, name: str, directory: Path, spec: LabSpec, progress: Callable[[str], None]
    ) -> None:
        self.name, self.directory, self.spec = name, directory, spec
        self._progress = progress
        self._reserved, self.plan = reserve(spec)
        self._processes = Processes(asyncio.get_running_loop(), programs.environment(directory))
        self._network: network.Network | None = None
        self.nodes: dict[str, LabNode] = {}
        self._backup: ControllerMachine | None = None
        self._root = ""

    async def build(self) -> None:
        """Start everything; return when every node that joined is idle."""
        world.make_tree(self.directory, self.name, self.spec, self.plan)
        database = Database(self.directory, self._processes) if self.spec.slurmdbd else None
        if database is not None:
            self._progress("starting MariaDB")
            database.make_directory()
        world.mount_world(self.directory)
        if (root := self.spec.root_directory()) is not None:
            self._root = str(rootfs.mount_root(root, self.directory))
        munge = asyncio.create_task(self._start_munge())
        if self.spec.network:
            self._network = network.Network(self._processes, self._log("network.log"))
            await self._network.start()
        self._ctl = await self._controller("ctl", 0)
        if self.spec.backup:
            self._backup = await self._controller(BACKUP, network.BACKUP_NUMBER)
        await self._leave_cgroups_alone()
        await munge
        if database is not None:
            await database.start()
            self._progress("starting slurmdbd")
            await self._start_accounting()
        self._progress("starting slurmctld")
        self._ctl.start_daemon("slurmctld")
        await self._answers("slurmctld", "scontrol", "ping")
        if self._backup is not None:
            self._backup.start_daemon("slurmctld")
        for number in range(1, self.spec.nodes + 1):
            node = LabNode(number, self.directory, self.spec, self._processes, self._network)
            node.root = self._root
            self.nodes[node.name] = node
        sresctld = self._ctl.start_daemon("sresctld") if self.spec.daemons else None
        self._progress(f"starting {self.spec.nodes} nodes")
        # A node that does not join is reported, not fatal: that is what a lab is for.
        await asyncio.gather(*(n.power_on() for n in self.nodes.values()), return_exceptions=True)
        await self._idle()
        if sresctld is not None:
            await self._daemons_live(sresctld)
            if self._backup is not None:
                self._backup.start_daemon("sresctld")
        self._raise_for_dead_daemons()

    async def _controller(self, name: str, number: int) -> ControllerMachine:
        machine = ControllerMachine(name, number, self.directory, self._processes, self._network)
        machine.root = self._root
        await machine.come_up()
        return machine

    async def _daemons_live(self, sresctld: asyncio.Future[int]) -> None:
        """Wait until sresctld serves and the first node's sresd watches.

        All nodes run the same program, so one stands for all; starting many takes long.
        """
        port = self.plan.sresctld_port
        log = self._log("sresctld.log")
        await self._until("sresctld", lambda: listens(self._ctl.pid, port), sresctld, log)
        first = next((n for n in self.nodes.values() if n.daemons.get("sresd") == "running"), None)
        if first is not None:
            log = first.log / "sresd.log"
            await self._until(
                f"sresd on {first.name}", lambda: holds(log, SRESD_RUNS), first.end_of("sresd"), log
            )

    def _raise_for_dead_daemons(self) -> None:
        """Raise LabError for a daemon that died while the lab came up: nothing else would tell."""
        joined = [node for node in self.nodes.values() if node.state == "joined"]
        for place, log in [(self._ctl, self.directory / "log"), *((n, n.log) for n in joined)]:
            for name, state in place.daemons.items():
                if name in DAEMONS and state != "running":
                    line = _tail(log / f"{name}.log")
                    raise LabError(f"{name} on {place.name} has {state}{line}")

    async def _leave_cgroups_alone(self) -> None:
        _, said = await self._ctl.call(self._need("slurmctld"), "-V")
        version = conf.version(said)
        if version is not None and version >= conf.CGROUPS_CAN_BE_DISABLED:
            # These take the machine's cgroups even when no plugin asks for them.
            text = "CgroupPlugin=disabled\n"
            (self.directory / "etc" / "cgroup.conf").write_text(text)

    async def _start_munge(self) -> None:
        socket_file = self.directory / "munge" / "munge.socket.2"
        argv = [
            self._need("munged"), "--foreground", "--force",
            f"--key-file={self.directory / 'munge.key'}",
            f"--socket={socket_file}",
            f"--pid-file={self.directory / 'munge' / 'munged.pid'}",
            f"--log-file={self._log('munged.log')}",
            f"--seed-file={self.directory / 'munge' / 'munged.seed'}",
        ]  # fmt: skip
        _, end = self._processes.start(argv, self._log("munged.out"))
        await self._until("munged", socket_file.exists, end, self._log("munged.out"))

    async def _start_accounting(self) -> None:
        end = self._ctl.start_daemon("slurmdbd")
        log = self._log("slurmdbd.log")
        sacctmgr = self._need("sacctmgr")
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while (await self._ctl.call(sacctmgr, "-n", "show", "cluster"))[0]:
            if end.done() or time.monotonic() > deadline:
                raise LabError(f"slurmdbd does not answer{_tail(log)}")
            await asyncio.sleep(0.1)
        people = ",".join(["nobody", *conf.PEOPLE])
        for words in (
            ["cluster", self.name],
            ["account", "lab", "Description=lab", "Organization=lab"],
            ["user", f"root,{people}", "Account=lab"],
        ):
            code, said = await self._ctl.call(sacctmgr, "-i", "add", *words)
            if code:
                raise LabError(f"sacctmgr add {words[0]} failed: {said}")

    async def _answers(self, daemon: str, command: str, *words: str) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        program = self._need(command)
        while (await self._ctl.call(program, *words))[0]:
            if self._ctl.daemons.get(daemon) != "running" or time.monotonic() > deadline:
                log = self._log(f"{daemon}.log")
                raise LabError(f"{daemon} does not answer{_tail(log)}")
            await asyncio.sleep(0.02)

    async def _idle(self) -> None:
        self._progress("waiting for the nodes to be idle")
        sinfo = self._need("sinfo")
        deadline = time.monotonic() + IDLE_TIMEOUT_SECONDS
        joined = {node.name for node in self.nodes.values() if node.state == "joined"}
        states: dict[str, str] = {}
        while True:
            _, said = await self._ctl.call(sinfo, "-h", "-N", "-o", "%N %T")
            words = (line.split() for line in said.splitlines())
            states = {word[0]: word[1] for word in words if len(word) == 2}
            waiting = sorted(name for name in joined if states.get(name) != "idle")
            if not waiting:
                return
            if time.monotonic() > deadline:
                seen = ", ".join(f"{name} is {states.get(name, 'unknown')}" for name in waiting)
                raise LabError(f"nodes did not become idle: {seen}")
            await asyncio.sleep(0.05)

    async def _until(
        self, what: str, ready: Callable[[], bool], end: asyncio.Future[int], log: Path
    ) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while not ready():
            if end.done() or time.monotonic() > deadline:
                raise LabError(f"{what} did not start{_tail(log)}")
            await asyncio.sleep(0.005)

    def node(self, name: str) -> LabNode:
        """Return a node by name."""
        if name not in self.nodes:
            raise NotFound(
                f"no node '{name}' in lab '{self.name}'; it has n1 to n{self.spec.nodes}"
            )
        return self.nodes[name]

    def place(self, name: str) -> LabNode | ControllerMachine:
        """Return a node, ``ctl``, or ``ctl2`` where there is one."""
        return self.controllers.get(name) or self.node(name)

    @property
    def controllers(self) -> dict[str, ControllerMachine]:
        """The machines of slurmctld, by name."""
        return {machine.name: machine for machine in (self._ctl, self._backup) if machine}

    async def cut(self, node: Machine) -> None:
        """Pull a machine's network cable."""
        await self._cable(node, cut=True)

    async def mend(self, node: Machine) -> None:
        """Put it back."""
        await self._cable(node, cut=False)

    async def _cable(self, node: Machine, cut: bool) -> None:
        if self._network is None:
            raise LabError(
                f"{node.name} has no cable of its own; `sres lab up --network` gives one"
            )
        if node.cut == cut:
            raise LabError(f"{node.name}'s cable is {'cut' if cut else 'in place'} already")
        node.cut = cut
        if node.powered:
            await (self._network.pull if cut else self._network.mend)(node.name)

    async def daemon(self, verb: str, name: str, places: list[str], number: int) -> None:
        """Start or kill a daemon, of the controller or of nodes."""
        per_node = name in ("slurmd", "sresd")
        if not per_node and name not in ("slurmctld", "slurmdbd", "sresctld"):
            raise UsageError(f"'{name}' is no daemon of a lab; sresctld, sresd, slurmctld, slurmd")
        known: dict[str, LabNode | ControllerMachine] = {**self.nodes}
        if not per_node:
            known = {**self.controllers}
            places = places or ["ctl"]
        if not places or not set(places) <= set(known):
            raise UsageError(f"{name} runs on {'nodes: name them' if per_node else 'ctl only'}")
        for place in [known[p] for p in places]:
            if verb == "daemon-kill":
                place.signal(name, number)
                # The signal may be one that it survives; then there is no end to wait for.
                if number in (9, 15):
                    await place.wait_end(name)
            else:
                place.start_daemon(name)

    def status(self) -> dict[str, Any]:
        """Return what runs, as the keeper sees it."""
        return {
            "name": self.name,
            "directory": str(self.directory),
            "network": self.spec.network,
            "ctl": dict(self._ctl.daemons),
            "controllers": {name: one.describe() for name, one in self.controllers.items()},
            "nodes": {name: node.describe() for name, node in self.nodes.items()},
        }

    def _log(self, name: str) -> Path:
        return self.directory / "log" / name

    def _need(self, program: str) -> str:
        path = programs.find(program, self._root if program != "munged" else "")
        if path is None:
            raise MissingTool(f"{program} is not installed")
        return path


def listens(pid: int | None, port: int) -> bool:
    """Tell whether a TCP port is listened on in a process's network."""
    tables = [Path(f"/proc/{pid}/net/{kind}") for kind in ("tcp", "tcp6")]
    lines = (line.split() for table in tables if table.exists() for line in table.open())
    # Fields: number, local address, remote address, state (0A: listening), …
    return any(f[1].endswith(f":{port:04X}") and f[3] == "0A" for f in lines)


def holds(log: Path, text: str) -> bool:
    """Tell whether a file holds a text."""
    return log.exists() and text in log.read_text(errors="replace")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
    return f": {' | '.join(lines)}" if lines else f"; see {log}"
