"""Pid 1 of a lab node: sets the node's own world up, then starts, watches and reaps.

It decides nothing. The keeper says over a socket what to start and to kill, one JSON object a line,
and hears how it ended:

    keeper → {"hostname": …, "root": …, "binds": [[from, to], …]}   once, first
           → {"start": NAME, "argv": […], "env": {…}, "log": PATH}  → {"kill": NAME, "signal": 9}
    init   → {"up": true}  {"pid": 7, "name": NAME}  {"exited": NAME, "code": 0}

Standard library only: a node boots as fast as this file loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from slurm_resilience.lab.machines import linux


class Init:
    """The node's first process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unread = b""
        self._running: dict[int, str] = {}

    def run(self) -> None:
        """Serve the keeper until it is gone."""
        selector = selectors.DefaultSelector()
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake:
                    wake.recv(4096)
                    self._reap()
                else:
                    self._read()

    def _read(self) -> None:
        data = self._channel.recv(65536)
        if not data:
            # The keeper is pid 1 above us: with it gone the kernel is about to end us anyway.
            os._exit(1)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "hostname" in order:
                set_up(order)
                self._say(up=True)
            elif "start" in order:
                self._start(order)
            elif "kill" in order:
                self._kill(order["kill"], order["signal"])

    def _start(self, order: dict[str, Any]) -> None:
        name, argv = order["start"], order["argv"]
        try:
            pid = spawn(argv, order["env"], order["log"])
        except OSError as error:
            with Path(order["log"]).open("a", encoding="utf-8") as log:
                log.write(f"{argv[0]}: {error.strerror}\n")
            self._say(exited=name, code=127)
            return
        self._running[pid] = name
        self._say(name=name, pid=pid)

    def _kill(self, name: str, number: int) -> None:
        for pid, running in self._running.items():
            if running == name:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if name := self._running.pop(pid, None):
                self._say(exited=name, code=os.waitstatus_to_exitcode(status))

    def _say(self, **message: Any) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")


def set_up(order: dict[str, Any]) -> None:
    """Make the node's own view of the machine: name, processes, shared memory, files."""
    os.chdir("/")
    root = order["root"]
    # What lives in shared memory dies with the node, as it does with a machine.
    linux.mount("tmpfs", f"{root}/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
    linux.set_host_name(order["hostname"])
    for source, target in order["binds"]:
        if Path(f"{root}{target}").exists():
            linux.bind(source, f"{root}{target}")
    linux.mount_proc(root)
    if root:
        linux.pivot(root)


def spawn(argv: list[str], env: dict[str, str], log: str, stdin: int | None = None) -> int:
    """Start a program in its own session, with its output appended to a file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    first: tuple[Any, ...] = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    if stdin is not None:
        first = (os.POSIX_SPAWN_DUP2, stdin, 0)
    return os.posix_spawn(
        argv[0],
        argv,
        env,
        file_actions=[
            first,
            (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        # Python ignores these two; a daemon must not inherit that.
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
    )


def main() -> None:
    """Run as the keeper started it, with the number of the socket to the keeper."""
    Init(socket.socket(fileno=int(sys.argv[1]))).run()
