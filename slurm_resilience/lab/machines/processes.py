"""The keeper's children: starting them, and hearing of their end. The keeper is pid 1."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from slurm_resilience.lab.machines import linux
from slurm_resilience.lab.machines.init import spawn


class Processes:
    """Starts programs and reaps everything, strangers included."""

    def __init__(self, loop: asyncio.AbstractEventLoop, env: dict[str, str]) -> None:
        self._loop = loop
        self._env = env
        self._ends: dict[int, asyncio.Future[int]] = {}
        loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, pid: int) -> asyncio.Future[int]:
        """Return a future of the child's exit code (-N: ended by signal N)."""
        end: asyncio.Future[int] = self._loop.create_future()
        self._ends[pid] = end
        return end

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            end = self._ends.pop(pid, None)
            if end is not None and not end.done():
                end.set_result(os.waitstatus_to_exitcode(status))

    def start(
        self, argv: list[str], log: Path, env: dict[str, str] | None = None
    ) -> tuple[int, asyncio.Future[int]]:
        """Start a program; its pid and the future of its exit code."""
        pid = spawn(argv, self._env | (env or {}), str(log))
        return pid, self.watch(pid)

    async def run(
        self, argv: list[str], log: Path, network: int | None = None, text: str = ""
    ) -> int:
        """Run a program to its end, in a network namespace if given, with ``text`` as its input."""
        own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        feed = os.memfd_create("input", os.MFD_CLOEXEC)
        try:
            os.write(feed, text.encode())
            os.lseek(feed, 0, os.SEEK_SET)
            # The keeper has one thread: it may step over for the moment of the start.
            if network is not None:
                linux.setns(network, linux.NEWNET)
            pid = spawn(argv, self._env, str(log), stdin=feed)
            end = self.watch(pid)
        finally:
            if network is not None:
                linux.setns(own, linux.NEWNET)
            os.close(feed)
            os.close(own)
        return await end


def fork_node(argv: list[str], env: dict[str, str], channel: int, network: bool) -> int:
    """Start ``argv`` as pid 1 of new namespaces; its pid as the caller sees it.

    ``channel`` is the one file it inherits. The process in between ends at once, so the caller,
    being pid 1, becomes the parent and learns how the node ended (SIGHUP: it rebooted itself).
    """
    answer, told = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            linux.set_boot_time_to_now()
            own = linux.NEWNS | linux.NEWUTS | linux.NEWIPC | linux.NEWPID
            linux.unshare(own | (linux.NEWNET if network else 0))
            child = os.fork()
            if child == 0:
                os.set_inheritable(channel, True)
                os.execve(argv[0], argv, env)
            os.write(told, str(child).encode())
        except OSError as error:
            os.write(told, f"{error}".encode())
        finally:
            os._exit(0)
    os.close(told)
    with os.fdopen(answer, "rb") as pipe:
        words = pipe.read().decode()
    if not words.isdigit():
        raise OSError(f"cannot make a node's namespaces: {words or 'the helper died'}")
    return int(words)
