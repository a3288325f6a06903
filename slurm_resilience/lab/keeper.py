"""The lab's pid 1: builds it, serves its commands, and with it everything ends.

Every process of a lab lives in the keeper's PID namespace and every mount in its mount namespace,
so that the kernel itself leaves nothing behind when the keeper goes, however it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path

from slurm_resilience.errors import SresError
from slurm_resilience.lab import space
from slurm_resilience.lab.cluster import LabCluster
from slurm_resilience.lab.machines import linux
from slurm_resilience.lab.server import serve
from slurm_resilience.lab.spec import LabSpec


class _Abandoned(Exception):
    """The process that asked for the lab died before it was ready."""


class LabOwner:
    """The other end: the `up` that asked for this lab."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel

    def say(self, **message: object) -> None:
        """Tell it; an `up` that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    async def word(self) -> str:
        """Its next word; empty when it is gone."""
        with contextlib.suppress(OSError):
            data = await asyncio.get_running_loop().sock_recv(self._channel, 100)
            return data.decode().strip()
        return ""

    def close(self) -> None:
        """Nothing more is to be said."""
        self._channel.close()


async def keep(name: str, directory: Path, spec: LabSpec, owner: LabOwner) -> None:
    """Build the lab, then serve it for ever.

    Raises:
        SresError: it could not be built.
        _Abandoned: no process waits for it any more.
    """
    cluster = LabCluster(name, directory, spec, lambda text: owner.say(progress=text))
    build = asyncio.create_task(cluster.build())
    word = asyncio.create_task(owner.word())
    await asyncio.wait({build, word}, return_when=asyncio.FIRST_COMPLETED)
    if not build.done():
        raise _Abandoned
    build.result()
    server = serve(cluster, directory / "keeper.sock")
    owner.say(ready=True)
    if await word != "keep":
        raise _Abandoned
    owner.close()
    await server


def main() -> None:
    """``keeper NAME DIRECTORY SOCKET LOCK``: the last two are numbers of open files.

    SOCKET leads to `up`; LOCK is the directory's lock, which is held as long as the keeper lives.
    """
    name, directory, owner = sys.argv[1], Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
    for inherited in (owner.fileno(), int(sys.argv[4])):
        os.set_inheritable(inherited, False)
    try:
        linux.unshare(linux.NEWNS | linux.NEWPID | linux.NEWUTS)
    except OSError as error:
        line = f"this machine does not let root make namespaces (unshare: {error.strerror})"
        LabOwner(owner).say(error=line, kind="LabError")
        sys.exit(1)
    pid = os.fork()
    if pid:
        LabOwner(owner).say(pid=pid)
        os._exit(0)
    try:
        linux.make_mounts_private()
        linux.mount_proc()
        # munged wants to find its own name in the host table, which is the lab's.
        linux.set_host_name("ctl")
    except OSError as error:
        line = f"this machine does not let root change mounts ({error.filename}: {error.strerror})"
        LabOwner(owner).say(error=line, kind="LabError")
        sys.exit(1)
    _live(name, directory, LabOwner(owner))
    sys.stderr.flush()
    # `up` takes the end of the socket for the keeper's own: it must not close before, as it would
    # while Python tidies up.
    os._exit(0)


def _live(name: str, directory: Path, owner: LabOwner) -> None:
    try:
        spec = LabSpec.from_json((directory / "spec.json").read_text())
        asyncio.run(keep(name, directory, spec, owner))
    except _Abandoned:
        pass
    except SresError as error:
        owner.say(error=str(error), kind=type(error).__name__)
    except OSError as error:
        traceback.print_exc()
        owner.say(error=_refusal(error, directory), kind="LabError")
    except BaseException as error:
        traceback.print_exc()
        owner.say(error=f"the keeper failed: {error!r}", kind="LabError")
    end_everything()
    shutil.rmtree(directory, ignore_errors=True)


def _refusal(error: OSError, directory: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = space.mount_point(directory)
        return f"no space is left on {full}, where the lab is ({error.filename or directory})"
    return f"the keeper failed: {error!r}"


def end_everything() -> None:
    """End every process of the lab but the keeper, and wait until they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
