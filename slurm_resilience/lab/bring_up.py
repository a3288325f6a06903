"""A lab's birth and end, seen from outside: its directory, its keeper, and what may be missing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience import errors
from slurm_resilience.errors import LabError, MissingTool, UsageError
from slurm_resilience.lab import programs, space
from slurm_resilience.lab.spec import MAX_DIRECTORY, LabSpec
from slurm_resilience.lab.state_file import BASE, HINT, KEEPER_FILE, MARK, alive, check_name, stat

_CLAIM_ATTEMPTS = 5
_KEEPER = (sys.executable, "-P", "-m", "slurm_resilience.lab.keeper")
_TOOLS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "scontrol": "slurm-client",
    "munged": "munge",
}


def missing(spec: LabSpec) -> str | None:
    """Return what keeps this machine from having such a lab, in one line; None when nothing
    does."""
    if os.geteuid() != 0:
        return "a lab needs root (it makes namespaces and mounts); run it with sudo"
    tools = dict(_TOOLS)
    if spec.network:
        tools["ip"] = "iproute2"
    if spec.slurmdbd:
        tools |= {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
    root = str(spec.root_directory() or "")
    # Who vouches and who stores are the machine's own also for another Slurm.
    outside = ("munged", "ip", "mariadbd")
    absent = [
        package
        for tool, package in tools.items()
        if programs.find(tool, "" if tool in outside else root) is None
    ]
    if absent and root:
        return f"not installed here or in {root}: {' '.join(absent)}"
    if absent:
        return f"not installed: {' '.join(absent)}; `apt install {' '.join(absent)}`"
    return None


def create(
    spec: LabSpec,
    name: str,
    directory: str | Path | None,
    progress: Callable[[str], None],
    tied: bool,
) -> tuple[Path, socket.socket]:
    """Start a keeper and wait until its lab is ready.

    Returns:
        the lab's directory, and a socket: a tied lab ends when it is closed.
    """
    spec.check()
    check_name(name)
    if os.geteuid() != 0:
        raise LabError(missing(spec) or "")
    if (lack := missing(spec)) is not None:
        raise MissingTool(lack)
    place = Path(directory).absolute() if directory else BASE / name
    if len(str(place)) > MAX_DIRECTORY or any(c.isspace() or c in "'\"\\#" for c in str(place)):
        raise UsageError(
            f"{place}: a lab's directory has at most {MAX_DIRECTORY} plain characters; "
            "choose another --dir"
        )
    claim = _claim(name, place)
    if (shortage := space.lack(place, spec)) is not None:
        os.close(claim)
        _end(place)
        raise LabError(shortage)
    ours, theirs = socket.socketpair()
    try:
        (place / MARK).write_text(spec.to_json())
        (place / "log").mkdir()
        with theirs, (place / "log" / "keeper.log").open("wb") as log:
            keeper = subprocess.Popen(
                [*_KEEPER, name, str(place), str(theirs.fileno()), str(claim)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), claim),
                start_new_session=True,
                cwd="/",
                env=programs.environment(place),
            )
        _attend(ours, name, place, progress)
        if not tied:
            ours.sendall(b"keep\n")
        keeper.wait()
    except BaseException:
        ours.close()
        _end(place)
        raise
    finally:
        os.close(claim)
    return place, ours


def _attend(
    channel: socket.socket, name: str, place: Path, progress: Callable[[str], None]
) -> None:
    with channel.makefile("rb") as lines:
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "pid" in message:
                pid = message["pid"]
                keeper = {"name": name, "pid": pid, "start": stat(pid)[1]}
                (place / KEEPER_FILE).write_text(json.dumps(keeper))
            elif "progress" in message:
                progress(message["progress"])
            elif "ready" in message:
                return
            elif "error" in message:
                # Until the keeper has ended: it may be removing the file that says which process
                # it is, and would then be left to itself.
                lines.read()
                raise getattr(errors, message["kind"], LabError)(message["error"])
    said = (place / "log" / "keeper.log").read_text(errors="replace").strip().splitlines()
    last = f" (its last words: {said[-1]})" if said else ""
    raise LabError(f"the lab's keeper died while it built the lab{last}; nothing is left of it")


def destroy(directory: Path) -> None:
    """End a lab, alive or dead, and remove its directory.

    Raises:
        LabError: there is none.
    """
    if not (directory / MARK).exists():
        raise LabError(f"no lab in {directory}; {HINT}")
    _end(directory)


def _end(directory: Path) -> None:
    try:
        keeper = json.loads((directory / KEEPER_FILE).read_text())
    except (OSError, ValueError):
        keeper = None
    if keeper is not None:
        try:
            handle = os.pidfd_open(keeper["pid"])
        except OSError:
            handle = -1
        if handle >= 0:
            try:
                # Checked with the handle open: the number cannot change hands any more.
                if alive(keeper):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    # Readable once the kernel has ended the whole PID namespace.
                    select.select([handle], [], [], 30)
            finally:
                os.close(handle)
    shutil.rmtree(directory, ignore_errors=True)
    if directory.parent == BASE:
        with contextlib.suppress(OSError):
            BASE.rmdir()


def _claim(name: str, place: Path) -> int:
    """Make the directory this lab's own; the lock that the keeper holds for its life."""
    for attempt in range(_CLAIM_ATTEMPTS):
        try:
            place.mkdir(parents=True, exist_ok=True)
            claim = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            break
        except OSError as error:
            # The last lab of the machine, on its end, may take the empty parent away.
            if isinstance(error, FileNotFoundError) and attempt < _CLAIM_ATTEMPTS - 1:
                continue
            raise LabError(f"{place}: {error.strerror}; choose another --dir") from None
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A `down` may have removed the directory between the two calls above.
        if place.stat().st_ino != os.fstat(claim).st_ino:
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError):
        os.close(claim)
        raise LabError(f"lab '{name}' is up already; `sres lab down` ends it") from None
    left = [entry.name for entry in place.iterdir()]
    if left and MARK not in left:
        os.close(claim)
        raise LabError(f"{place} is not empty and not a lab's; choose an empty --dir")
    for entry in left:
        path = place / entry
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return claim
