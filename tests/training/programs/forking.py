"""Launchers that are forked from this process, and their ranks from them: torch is imported once.

Importing it is most of what a short training costs. The real start is tested elsewhere
(test_launcher_run.py, test_plain_programs.py, the demo, one of the examples).

    python forking.py SOCKET [MODULE…]

Who connects sends one line of JSON, ``{"argv": […], "env": {…}, "out": PATH}``, and is told the
exit code; who hangs up has the launcher killed. With ``err`` its stderr has a file of its own, with
``cwd`` it works in that directory. Launchers and ranks write the stacks of their threads to stderr
at SIGRTMAX.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slurm_resilience.launcher.main import main as launcher
from slurm_resilience.launcher.processes import process

for _name in (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
):
    importlib.import_module(_name)


class Forked:
    """The part of `subprocess.Popen` that `Process` needs."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int | None,
        stderr: int | None,
        pass_fds: Sequence[int],
        process_group: int,
    ) -> None:
        assert threading.active_count() == 1, threading.enumerate()
        self.stdout, out = _pipe(stdout)
        self.stderr, err = _pipe(stderr)
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, env, out, err, pass_fds)
        # Here too: a signal to the group must find it.
        with suppress(OSError):
            os.setpgid(self.pid, process_group or self.pid)
        for end in (out, err):
            if end is not None:
                os.close(end)

    def wait(self) -> int:
        """As `Popen.wait`: negative, if a signal ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _pipe(wanted: int | None) -> tuple[BinaryIO | None, int | None]:
    if wanted is None:
        return None, None
    ours, theirs = os.pipe()
    return os.fdopen(ours, "rb"), theirs


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: int | None,
    err: int | None,
    kept: Sequence[int],
) -> None:
    """In the child: everything of the launcher's is let go of, and starter.py is run."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)) and number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        for end, number in ((out, 1), (err, 2)):
            if end is not None:
                os.dup2(end, number)
        _close_all_but(kept)
        os.environ.clear()
        os.environ.update(environment)
        logging.getLogger().handlers.clear()
        atexit._clear()
        # A process that imports torch itself begins with another seed than any other one.
        torch.seed()
        # -u STARTER FD PARENT …
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        starter = command[2]
        sys.argv[:] = command[2:]
        sys.path.insert(0, str(Path(starter).parent))
        runpy.run_path(starter, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _launch(order: dict[str, Any]) -> None:
    """In the child: be the launcher."""
    code = 1
    try:
        _die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        for number, name in ((1, order["out"]), (2, order.get("err", order["out"]))):
            os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
        os.chdir(order.get("cwd", "."))
        _close_all_but(())
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(order["env"])
        stand_in: Any = type("subprocess", (), {**vars(subprocess), "Popen": Forked})
        vars(process)["subprocess"] = stand_in
        code = launcher(order["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _close_all_but(kept: Sequence[int]) -> None:
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2 and int(entry.name) not in kept:
            with suppress(OSError):
                os.close(int(entry.name))


def main() -> None:
    _die_with_parent()
    # Forks inherit it, and it needs no lock of Python's: a rank may hang for that.
    faulthandler.register(signal.SIGRTMAX, file=2)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    ear = socket.socket(socket.AF_UNIX)
    ear.bind(f"{sys.argv[1]}.new")
    ear.listen(64)
    Path(f"{sys.argv[1]}.new").rename(sys.argv[1])  # a reader that sees it can connect
    found = selectors.DefaultSelector()
    found.register(ear, selectors.EVENT_READ)
    running: dict[socket.socket, tuple[int, int]] = {}
    while True:
        for key, _ in found.select():
            if key.fileobj is ear:
                caller = ear.accept()[0]
                order = json.loads(caller.makefile("rb").readline())
                pid = os.fork()
                if pid == 0:
                    _launch(order)
                running[caller] = pid, os.pidfd_open(pid)
                found.register(caller, selectors.EVENT_READ)
                found.register(running[caller][1], selectors.EVENT_READ, caller)
                continue
            ended = key.data is not None
            caller = key.data if ended else key.fileobj
            if caller not in running:
                continue
            pid, pidfd = running.pop(caller)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):
                caller.sendall(b"%d\n" % code)
            found.unregister(pidfd)
            found.unregister(caller)
            os.close(pidfd)
            caller.close()


if __name__ == "__main__":
    main()
