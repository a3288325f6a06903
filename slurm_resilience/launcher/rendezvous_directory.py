"""Prepare the directory in which the ranks meet, the secret that they share, and a private
directory."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import MissingTool, SresError, UsageError
from slurm_resilience.launcher import exit_codes
from slurm_resilience.launcher.flags import MasterAddress, addresses, secret
from slurm_resilience.launcher.node_rank import NodeRank, own_run
from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.rendezvous import (
    LAUNCHERS,
    RESTARTS,
    SharedDirectory,
    TrainingOutcome,
    next_training,
    shared_home,
)
from slurm_resilience.mesh.speaker_files import read_plain

T = TypeVar("T")

_PREFIX = "sres-run-"
_FRESH_SECONDS = 60.0
"""Seconds in which a directory may belong to a process that has not locked it yet."""
_ENDING_SECONDS, _LOOK_SECONDS, _CONNECT_SECONDS = 5.0, 0.2, 1.0
"""Ranks of a launcher that was killed may live for so long when the next one begins."""
_ROOM_BYTES = 256 * 1024
"""A private directory has room for: the ranks' entries, a page each, and a socket."""
_HANG_SECONDS = 2.0
"""A shared directory that answers later hangs."""
_COUNTING = threading.Lock()
"""Held while a seat's number is written: one that comes late must not undo a later one."""
_LONGEST = 80
"""A unix socket's path has 108 bytes at most."""


class RendezvousDirectory(msgspec.Struct, frozen=True):
    """The place where this run's ranks meet."""

    meet: str
    """`SRES_MEET`."""
    secret: str = ""
    """`SRES_SECRET`; empty: the ranks keep one in the directory."""
    first: str = ""
    """Host of node 0, if it is known."""
    directory: Path | None = None
    """Shared by the nodes; remembers the seats' incarnations."""
    note: str = ""
    passed: Path | None = None
    """Made when this node's launcher has ended well; None: no other one comes after it."""


def private_directory() -> Path:
    """Make a fresh directory of this user alone (mode 0700), in memory if possible."""
    for parent in ("/dev/shm", os.environ.get("TMPDIR", ""), "/tmp"):
        if parent and len(parent) <= _LONGEST and os.access(parent, os.W_OK | os.X_OK):
            with suppress(OSError):
                _clean(Path(parent))
                made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                if not _has_room(made):
                    continue
                # Held until this process and its guard have ended, however they end.
                fcntl.flock(os.open(made, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
                return made
    raise SresError("no directory for private files: make room in /dev/shm, $TMPDIR or /tmp")


def _has_room(made: Path) -> bool:
    """Tell whether a fresh directory can be used: one can be made where all is full. Else remove
    it."""
    probe = made / "room"
    try:
        probe.write_bytes(bytes(_ROOM_BYTES))
    except OSError:
        remove(made)
        return False
    probe.unlink()
    return True


def _clean(parent: Path) -> None:
    """Remove what this user's launchers left that were killed together with their guards, as Slurm
    kills a step. Who lives holds a lock."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                info = os.fstat(handle)
                if (
                    info.st_uid == os.geteuid()
                    and SYSTEM_CLOCK.now() - info.st_ctime > _FRESH_SECONDS
                ):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def choose(
    environment: Mapping[str, str],
    here: NodeRank,
    ranks: int,
    private: Path,
    backend: str | None = None,
    endpoint: str | None = None,
    secret_file: str | None = None,
) -> RendezvousDirectory:
    """Decide where to meet.

    Args:
        environment: the launcher's.
        here: this node's place.
        ranks: on each node.
        private: this node's private directory.
        backend: --rdzv-backend.
        endpoint: --rdzv-endpoint.
        secret_file: --secret-file.

    Raises:
        UsageError: there is not enough to go by, with what to add.
    """
    shared = _secret(environment, secret_file)
    note = ""
    if backend not in (None, "dir", "peers"):
        note = f"--rdzv-backend={backend} needs a server, so it is not used: "
        backend = "peers" if here.nodes.most > 1 and shared else None
        if endpoint and (here.alone or len(addresses(endpoint)) < here.nodes.most):
            endpoint = None
    if backend is None and endpoint:
        backend = "dir" if "/" in endpoint else "peers"
    if backend is None and not here.alone and "SRES_MEET" in environment:
        return RendezvousDirectory(
            environment["SRES_MEET"], shared, note=note and f"{note}$SRES_MEET is"
        )
    if backend == "peers":
        if not shared and not here.alone:
            is_name = bool(endpoint) and not set(endpoint or "") & set(",:")
            directory_too = f"; if {endpoint} is a directory, write ./{endpoint}" if is_name else ""
            raise UsageError(
                "--rdzv-backend=peers: several nodes need a common secret: give --secret-file FILE "
                f"or $SRES_SECRET (openssl rand -hex 32){directory_too}"
            )
        nodes = addresses(endpoint) if endpoint else _slurm(environment, here)
        if len(nodes) != here.nodes.most:
            raise UsageError(
                f"--rdzv-endpoint names {len(nodes)} nodes, but there are {here.nodes.most}: write "
                "HOST:PORT of each, separated by commas, in the order of their ranks"
            )
        seats = ",".join(node.seat(local) for node in nodes for local in range(ranks))
        return RendezvousDirectory(
            f"peers:{seats}",
            shared or secrets.token_hex(32),
            nodes[0].host,
            note=note and f"{note}the nodes meet each other",
        )
    if here.alone and not endpoint:
        return RendezvousDirectory(
            f"dir:{private}/mesh",
            shared or secrets.token_hex(32),
            "127.0.0.1",
            note=note and f"{note}the ranks meet in a private directory",
        )
    directory = _directory(environment, here, endpoint)
    if not {"SRES_TOKEN", "SRES_SEATS_HERE"} & set(environment):
        own = range(here.rank * ranks, (here.rank + 1) * ranks)
        _refuse_running(directory / "mesh", own, ranks * here.nodes.most)
        for launchers in (LAUNCHERS, RESTARTS):
            _refuse_running(directory / launchers, range(here.rank, here.rank + 1), here.nodes.most)
    passed: Path | None = None
    if "SLURM_JOB_ID" in environment:  # the name is new for every step
        node = environment.get("SLURMD_NODENAME") or os.uname().nodename
        step = environment.get("SLURM_STEP_ID", "batch")
        directory, passed = next_training(directory, f"{node}.{step}")
    else:
        _refuse_complete(directory)
    return RendezvousDirectory(
        f"dir:{directory}/mesh",
        shared,
        directory=directory,
        note=note and f"{note}{directory} is",
        passed=passed,
    )


def _directory(environment: Mapping[str, str], here: NodeRank, endpoint: str | None) -> Path:
    """Return the run's own part of a shared directory: what an earlier run left does not count."""
    run = here.run.replace("/", "_")
    own = "" if endpoint else own_run(environment, in_step=False)
    if own and not here.run.startswith(own):
        # A --rdzv-id that a script has for torchrun: jobs of the same script would meet each other.
        run = f"{own}-{run}"
    base = endpoint or shared_home(environment)
    if not base and "SLURM_JOB_ID" in environment:
        base = ".sres"  # Slurm starts every task where srun was called: mostly a shared place
    if not base:
        raise UsageError(
            "where do the nodes meet? Give --rdzv-backend=dir --rdzv-endpoint=DIRECTORY (shared) "
            "or --rdzv-backend=peers --rdzv-endpoint=HOST,HOST --secret-file=FILE"
        )
    directory = Path(base) / "run" / run
    try:
        directory = directory.absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}; --rdzv-endpoint=DIRECTORY") from None
    return directory


def _refuse_complete(directory: Path) -> None:
    """Else the ranks, or the launchers of a plain program, would take themselves for late ones, and
    end as if they had trained."""
    for name in ("mesh", LAUNCHERS, RESTARTS):
        ended = _outcome(directory / name)
        if ended is not None and ended.code == exit_codes.DONE:
            step = f" (step {ended.step})" if ended.step >= 0 else ""
            raise UsageError(
                f"{directory}: a training that met here is complete{step}: give this one a new "
                "--rdzv-id, or remove the directory"
            )


def _refuse_running(meet: Path, seats: range, world: int) -> None:
    """Else two trainings would take each other's seats in turn, until both have ended. Not where a
    supervisor starts this launcher: it knows what it replaces.

    Args:
        meet: the directory in which the ranks, or the launchers, meet.
        seats: those of this node.
        world: seats of all nodes.
    """
    deadline = SYSTEM_CLOCK.monotonic() + _ENDING_SECONDS
    while living := _living(meet, seats, world):
        if SYSTEM_CLOCK.monotonic() > deadline:
            where = f"process {living.pid} of {living.node or living.host}"
            is_launcher = meet.name in (LAUNCHERS, RESTARTS)
            what = "the launcher of its node rank" if is_launcher else "its rank"
            raise UsageError(
                f"{meet.parent}: a training that meets here is running: {where} is {what} "
                f"{living.seat}. Give this one a new --rdzv-id, or end that one"
            )
        SYSTEM_CLOCK.wait(threading.Event(), _LOOK_SECONDS)


def _living(meet: Path, seats: range, world: int) -> Peer | None:
    """Return a process on one of these seats that can be reached. One that was started for a world
    of another size takes no seat from this one's: the ranks meet, and both nodes are told."""
    for peer in SharedDirectory(meet).peers() if meet.exists() else []:
        if peer.seat in seats and peer.seats in (0, world):
            with suppress(OSError):
                socket.create_connection((peer.host, peer.port), _CONNECT_SECONDS).close()
                return peer
    return None


def is_complete(meet: str) -> bool:
    """Tell whether the training that meets here (`SRES_MEET`) is complete, as far as is known."""
    kind, _, path = meet.partition(":")
    ended = _not_for_long(lambda: _outcome(Path(path)), None) if kind == "dir" else None
    return ended is not None and ended.code == exit_codes.DONE


def _outcome(meet: Path) -> TrainingOutcome | None:
    try:
        return msgspec.json.decode(read_plain(meet / "outcome"), type=TrainingOutcome)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _secret(environment: Mapping[str, str], file: str | None) -> str:
    if file is not None:
        try:
            if Path(file).stat().st_mode & 0o077:
                raise UsageError(
                    f"--secret-file={file}: others may read or write it: chmod 600 {file}"
                )
            return secret(Path(file).read_text(encoding="ascii"), file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not hex"
            raise UsageError(f"--secret-file={file}: {reason}") from None
    given = environment.get("SRES_SECRET", "")
    return secret(given, "$SRES_SECRET") if given else ""


def _slurm(environment: Mapping[str, str], here: NodeRank) -> tuple[MasterAddress, ...]:
    """Return the step's nodes, in its order."""
    names = ("NODE_LIST", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    text = next((environment[name] for name in names if environment.get(name)), "")
    if not text:
        if here.alone:
            return addresses("127.0.0.1")
        raise UsageError("--rdzv-backend=peers: give --rdzv-endpoint=HOST,HOST… of the nodes")
    try:
        from ClusterShell.NodeSet import NodeSet
    except ImportError:
        raise MissingTool(
            "ClusterShell is not installed; give --rdzv-endpoint=HOST,HOST…"
        ) from None
    nodes: list[str] = []
    for part in _parts(text):
        nodes += NodeSet(part)
    return addresses(",".join(nodes))


def _parts(hostlist: str) -> list[str]:
    """Split a host list, in its order: a NodeSet of the whole would sort it."""
    parts, depth = [""], 0
    for letter in hostlist:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def next_incarnation(rendezvous: RendezvousDirectory, seat: int, last: int) -> int:
    """Return the incarnation of a seat's next process, remembered for a launcher that is started
    again.

    Args:
        rendezvous: the place where the run's processes meet.
        seat: only this node's launcher writes it.
        last: the last one of this launcher; -1: none.
    """
    if rendezvous.directory is None:
        return last + 1
    file = rendezvous.directory / "seats" / str(seat)
    if last < 0:
        return _count(file, last)
    # This launcher has read it before, and knows the number.
    return _not_for_long(lambda: _count(file, last), last + 1)


def _count(file: Path, last: int) -> int:
    """Return the number after this one, and after the one that is written down; write it down."""
    with _COUNTING:
        with suppress(OSError, ValueError):
            last = max(last, int(read_plain(file)))
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, exist_ok=True)
            fresh = file.with_name(f".{file.name}.{os.getpid()}")
            fresh.write_text(f"{last + 1}\n", encoding="ascii")
            fresh.replace(file)
    return last + 1


def _not_for_long(look: Callable[[], T], otherwise: T) -> T:
    """Return the result of a look into the shared directory, which may hang: a launcher that waited
    for it would pass no signal on, and see no rank end.

    Args:
        look: raises nothing.
        otherwise: the result where it takes too long.
    """
    result = [otherwise]
    thread = threading.Thread(target=lambda: result.append(look()), daemon=True)
    thread.start()
    thread.join(_HANG_SECONDS)
    return result[-1]


def remove(directory: Path) -> None:
    """Remove the private directory."""
    shutil.rmtree(directory, ignore_errors=True)
