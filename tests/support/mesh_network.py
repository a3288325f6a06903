"""A network of namespaces for ranks of several nodes, and what goes wrong in it. Needs root.

Each node is a namespace with one cable to a router, which is one as well. The router drops, delays
and resets what passes: as in a real network, neither end is told.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable

CLONE_NEWNET = 0x40000000
NEEDED = ("ip", "nft", "ss", "tc")


def is_possible() -> bool:
    """Tell whether this machine can have such networks."""
    return os.geteuid() == 0 and all(map(shutil.which, NEEDED))


def _run(*argv: str, given: str = "", check: bool = True) -> None:
    subprocess.run(argv, input=given, text=True, check=check, capture_output=not check)


class Network:
    """Nodes that are joined by a router. A context manager."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._router = f"chaos{os.getpid()}"
        self._rules: dict[object, list[str]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Network:
        _run("ip", "netns", "add", self._router)
        within = ("ip", "netns", "exec", self._router)
        _run(*within, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for node in range(self._nodes):
            self._make(node)
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*map(self.name, range(self._nodes)), self._router):
            _run("ip", "netns", "del", name, check=False)

    def name(self, node: int) -> str:
        """Return the name of a node's namespace."""
        return f"{self._router}-{node}"

    @staticmethod
    def address(node: int) -> str:
        """Return a node's address."""
        return f"10.77.{node}.2"

    def enter(self, node: int) -> None:
        """Have this process be on a node."""
        descriptor = os.open(f"/run/netns/{self.name(node)}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no way into the namespace")
        os.close(descriptor)

    def _make(self, node: int) -> None:
        name, cable = self.name(node), f"cable{node}"
        _run("ip", "netns", "add", name)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "-n", self._router, "link", "add", cable, *ends)
        near = f"10.77.{node}.1"
        _run("ip", "-n", self._router, "address", "add", f"{near}/24", "dev", cable)
        _run("ip", "-n", self._router, "link", "set", cable, "up")
        _run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")
        _run("ip", "-n", name, "route", "add", "default", "via", near)

    # -- what goes wrong; each returns what mends it ----------------------------------------------

    def silence(self, source: int | None, target: int | None) -> Callable[[], None]:
        """Have nothing pass from one node (None: any) to another."""
        return self._add(f"{self._way(source, target)} drop")

    def lose(self, node: int, percent: int) -> Callable[[], None]:
        """Lose so much of what passes to or from a node."""
        chance = f"numgen random mod 100 < {percent} drop"
        return self._add(f"{self._way(node, None)} {chance}", f"{self._way(None, node)} {chance}")

    def forget(self, node: int) -> Callable[[], None]:
        """Have the router know of no connection to or from a node any more: it resets each one over
        which something is said, and lets new ones begin."""
        begun = "tcp flags & (syn | rst) == 0 reject with tcp reset"
        return self._add(f"{self._way(node, None)} {begun}", f"{self._way(None, node)} {begun}")

    def slow(self, node: int, rate: str) -> Callable[[], None]:
        """Have the cable to a node carry little, such as "64kbit": what waits for it is late."""
        queue = ("tc", "-n", self._router, "qdisc")
        device = ("dev", f"cable{node}", "root")
        _run(
            *queue,
            "add",
            *device,
            "tbf",
            "rate",
            rate,
            "burst",
            "4kb",
            "latency",
            "2s",
            check=False,
        )
        return lambda: _run(*queue, "del", *device, check=False)

    def unplug(self, node: int) -> Callable[[], None]:
        """Pull a node's cable: the router tells those who ask for the node that there is no way."""
        link = ("ip", "-n", self._router, "link", "set", f"cable{node}")
        _run(*link, "down")
        return lambda: _run(*link, "up")

    def power_off(self, node: int) -> None:
        """Have a node's kernel know nothing of its connections, and say nothing of their end. All
        its processes have ended, without being heard: call `silence` before they do."""
        _run("ip", "-n", self._router, "link", "del", f"cable{node}")
        _run("ip", "netns", "del", self.name(node))
        self._make(node)

    @staticmethod
    def _way(source: int | None, target: int | None) -> str:
        words = [f"ip saddr 10.77.{source}.2"] if source is not None else []
        words += [f"ip daddr 10.77.{target}.2"] if target is not None else []
        return " ".join(words)

    def _add(self, *rules: str) -> Callable[[], None]:
        key = object()
        self._set(key, list(rules))
        return lambda: self._set(key, [])

    def _set(self, key: object, rules: list[str]) -> None:
        with self._lock:
            self._rules[key] = rules
            table = [
                "table ip chaos",
                "delete table ip chaos",
                "table ip chaos { chain passing {",
                "type filter hook forward priority 0",
                *(line for some in self._rules.values() for line in some),
                "}",
                "}",
            ]
            _run("ip", "netns", "exec", self._router, "nft", "-f", "-", given="\n".join(table))
