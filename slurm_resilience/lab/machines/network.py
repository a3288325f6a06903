"""The lab's network: a switch in a namespace of its own, and a cable to every node.

Nothing of it exists in the machine's network: no link, no address, no route.
"""

from __future__ import annotations

import os
from pathlib import Path

from slurm_resilience.errors import LabError
from slurm_resilience.lab.machines import linux
from slurm_resilience.lab.machines.processes import Processes
from slurm_resilience.lab.programs import find

PREFIX = 16
BACKUP_NUMBER = 60_000
"""The second controller's: no node has it."""


def address(number: int) -> str:
    """Address of the controller (0), of its backup, or of node ``number``."""
    return f"10.77.{number // 250}.{number % 250 + 1}"


def _mac(number: int) -> str:
    # The same for every incarnation of a node: else its peers go on talking to the old card until
    # their ARP entries expire.
    return f"02:4c:41:42:{number // 256:02x}:{number % 256:02x}"


class Network:
    """The switch and its cables."""

    def __init__(self, processes: Processes, log: Path) -> None:
        self._processes = processes
        self._log = log
        self._switch = linux.new_network()
        self._ip = find("ip") or "ip"

    async def start(self) -> None:
        """Switch the switch on."""
        await self._run(self._switch, "link add br0 type bridge", "link set br0 up")

    async def plug(self, name: str, number: int, pid: int, connected: bool) -> None:
        """Give the node whose pid 1 is ``pid`` a network card and a cable."""
        await self._run(
            self._switch,
            f"link add p-{name} type veth peer name eth0 address {_mac(number)} netns {pid}",
            f"link set p-{name} master br0",
            f"link set p-{name} {'up' if connected else 'down'}",
        )
        inside = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._run(
                inside,
                "link set lo up",
                f"addr add {address(number)}/{PREFIX} dev eth0",
                "link set eth0 up",
            )
        finally:
            os.close(inside)

    async def pull(self, name: str) -> None:
        """Pull a node's cable: nothing that it sends from now on arrives, no FIN and no RST."""
        await self._run(self._switch, f"link set p-{name} down")

    async def mend(self, name: str) -> None:
        """Put a node's cable back."""
        await self._run(self._switch, f"link set p-{name} up")

    async def unplug(self, name: str) -> None:
        """Take the cable of a dead node away."""
        await self._run(self._switch, f"link del p-{name}", tolerant=True)

    async def _run(self, network: int, *commands: str, tolerant: bool = False) -> None:
        batch = "\n".join(commands) + "\n"
        argv = [self._ip, "-batch", "-"]
        code = await self._processes.run(argv, self._log, network=network, text=batch)
        # A dead node's cable may have gone with its namespace already.
        if code != 0 and not tolerant:
            raise LabError(f"`ip {commands[0]}` failed; see {self._log}")
