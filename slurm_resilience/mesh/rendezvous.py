"""Places at which peers find each other: a shared directory, or a list of addresses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.rank_variables import LENT
from slurm_resilience.mesh.speaker_files import SpeakerFiles, file_name, read_plain, whole_name
from slurm_resilience.wire.frames import UNREADABLE


class TrainingOutcome(msgspec.Struct, frozen=True):
    """The end of a training."""

    code: int
    step: int
    reason: str = ""
    seats: tuple[int, ...] = ()
    """Those of the last world, where it ended well; empty: not told."""


class Rendezvous(Protocol):
    """A place to meet."""

    def secret(self) -> bytes:
        """Return the secret that every peer of this training knows."""
        ...

    def other_secret(self) -> bytes | None:
        """Return the secret at this place, if it is another one than was read last; None: it is
        not.

        Raises:
            OSError, UsageError: it cannot be read.
        """
        ...

    def port(self, seat: int) -> int:
        """Return the port that a seat has to listen on; 0: any."""
        ...

    def enter(self, peer: Peer) -> None:
        """Make a peer known, if it is not.

        Raises:
            OSError, UsageError: it cannot be written down now.
        """
        ...

    def others(self) -> list[tuple[str, str, int]]:
        """Return all that may be there: (id or empty, host, port)."""
        ...

    def holders(self, me: Peer) -> tuple[Peer, ...] | None:
        """Return the peers on lent nodes that had the training's state shortly before this process
        came, and have not left; None: it is not known if there are any."""
        ...

    def leave(self, peer: Peer) -> None:
        """Forget a peer that has ended."""
        ...

    def outcome(self, code: int, step: int, reason: str, seats: Sequence[int] = ()) -> None:
        """Write down how the training ended, for observers and late processes."""
        ...

    def ended(self) -> TrainingOutcome | None:
        """Return the end of the training; None: it goes on, as far as is known here."""
        ...


LAUNCHERS = "launchers"
"""The directory, beside that of the ranks, in which the launchers of a plain program meet."""
RESTARTS = "restarts"
"""The same for other programs whose ranks are started again together."""
STATE = ".state"
"""Ends the name of a file beside an entry: its process, on a lent node, has the model's state."""
RECENT_SECONDS = 180.0
"""Such a process counts that wrote this file so long before a newcomer came, or later. It writes
it every minute."""
REMOVED, NEW_SECONDS = "removed", 75.0
"""The file by which a process tells that it had to make the directory anew; and the time until all
that live have written theirs, which they look at every minute."""
HOLD = "SRES_HOLD"
"""Names the file that a launcher waits for before it meets the others."""
HOLD_SECONDS = 60.0
"""The longest wait for it."""


class SharedDirectory:
    """A shared directory: ``peers/ID@NODE.json`` a peer, ``peers/ID@NODE.state`` the sign of life
    of one on a lent node that has the training's state, ``speakers/NODE.json`` the peer that speaks
    for a node, ``secret`` (mode 0600), ``outcome``."""

    def __init__(self, path: Path, secret: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
        """
        Args:
            path: made when it is missing (mode 0700).
            secret: hex; empty: the one in the directory, made by the first process.
            clock: tells how long this process has waited.

        Raises:
            UsageError: the directory cannot be used.
        """
        self.path = path
        self._clock = clock
        self._began_at = clock.monotonic()
        self._has_made_secret = False
        self._given = secret
        self._shared = ""
        """The secret in the directory, as it was read last; empty: it was not."""
        self._read: dict[str, Peer] = {}
        self.speakers = SpeakerFiles(path / "speakers")
        self._make()

    def _make(self) -> None:
        path = self.path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            (path / "peers").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: no directory to meet in: {error.strerror}") from None

    def _check_owner(self) -> None:
        info = self.path.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise UsageError(
                f"{self.path}: must belong to you and not be writable by others (chmod go-w)"
            )

    def secret(self) -> bytes:
        if self._given:
            return _hex(self._given, "SRES_SECRET")
        try:
            self._write_secret(os.urandom(32).hex())
            self._shared = self._read_secret()
        except OSError as error:
            raise UsageError(f"{self.path}: no secret: {error.strerror}") from None
        return _hex(self._shared, self.path / "secret")

    def _write_secret(self, text: str) -> None:
        """Write it, if there is none."""
        own = self.path / f".secret-{os.getpid()}-{os.urandom(4).hex()}"
        target = self.path / "secret"
        if target.exists():
            return
        # Linked, not renamed: the first one wins, and half of it is never read.
        with _draft(own):
            _write_private(own, text)
            with contextlib.suppress(FileExistsError):
                os.link(own, target)
                self._has_made_secret = True

    def _read_secret(self) -> str:
        # Another directory may be in its place by now.
        self._check_owner()
        target = self.path / "secret"
        descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            info = os.fstat(descriptor)
            if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise UsageError(f"{target}: must belong to you and not be readable by others")
            return file.read()

    def other_secret(self) -> bytes | None:
        # One that comes after the directory was removed makes another one. It is never replaced: so
        # all that look have one in common, whichever they found first.
        if not self._shared or (found := self._read_secret()) == self._shared:
            return None
        secret = _hex(found, self.path / "secret")
        self._shared = found
        return secret

    def port(self, seat: int) -> int:
        return 0

    def enter(self, peer: Peer) -> None:
        target = self._entry(peer, ".json")
        if target.exists() and (not self._shared or (self.path / "secret").exists()):
            return
        self._make()
        if self._shared:
            # One that comes later would make another one, and not be let in.
            self._write_secret(self._shared)
        draft = target.with_suffix(".new")
        with _draft(draft):
            draft.write_bytes(msgspec.json.encode(peer))
            draft.replace(target)

    def _entry(self, peer: Peer, kind: str) -> Path:
        return self.path / "peers" / f"{peer.id}@{file_name(peer.node)}{kind}"

    def peers(self, looks_at: Callable[[str], bool] | None = None) -> list[Peer]:
        """All that are written down; some may be dead.

        Args:
            looks_at: tells by a node's name if its ranks are wanted; None: all are.
        """
        place = self.path / "peers"
        names: list[str] = []
        # Names alone: a `Path` of each takes ten times as long, and there are as many as ranks.
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".json"))
        wanted: dict[str, bool] = {}
        found = []
        for name in names:
            if looks_at is not None:
                end = name.partition("@")[2]
                if end not in wanted:
                    node = whole_name(end.removesuffix(".json"))
                    wanted[end] = node is None or looks_at(node)
                if not wanted[end]:
                    continue
            if name not in self._read:  # a peer never changes
                with contextlib.suppress(OSError, *UNREADABLE):
                    entry = read_plain(place / name)
                    self._read[name] = msgspec.json.decode(entry, type=Peer)
            if name in self._read:
                found.append(self._read[name])
        return [peer for peer in found if looks_at is None or looks_at(peer.node)]

    def others(self) -> list[tuple[str, str, int]]:
        return [(peer.id, peer.host, peer.port) for peer in self.peers()]

    def note_removal(self) -> None:
        """Note that the directory was removed before this process came, if it was: one that is
        not among the first finds a secret there else."""
        if self._has_made_secret:
            (self.path / REMOVED).touch(mode=0o600)

    def note_state(self, peer: Peer) -> None:
        """Note that a peer has the training's state, and lives now."""
        self._entry(peer, STATE).touch(mode=0o600)

    def holders(self, me: Peer) -> tuple[Peer, ...] | None:
        place = self.path / "peers"
        try:
            # By the file system's clock alone. Where there is no room for the own entry, all count.
            since = _changed_at(self._entry(me, ".json")) - RECENT_SECONDS
            files = [path for path in place.iterdir() if path.suffix == STATE]
            names = (path.stem.partition("@")[0] for path in files if _changed_at(path) >= since)
            recent = set(names) - {me.id}
            if not recent and self._is_new(since + RECENT_SECONDS):
                return None
        except OSError:
            return None
        return tuple(peer for peer in self.peers() if peer.id in recent) if recent else ()

    def _is_new(self, entered_at: float) -> bool:
        """Tell whether the directory was removed so lately that those which live may not have
        written their files anew.

        Args:
            entered_at: when this process wrote its entry, by the file system's clock.
        """
        before = entered_at - _changed_at(self.path / REMOVED)
        return before + self._clock.monotonic() - self._began_at < NEW_SECONDS

    def leave(self, peer: Peer) -> None:
        for kind in (STATE, ".json"):
            with contextlib.suppress(OSError):
                self._entry(peer, kind).unlink()
        self.speakers.leave(peer)

    def outcome(self, code: int, step: int, reason: str, seats: Sequence[int] = ()) -> None:
        target = self.path / "outcome"
        draft = self.path / f".outcome-{os.getpid()}"
        with contextlib.suppress(OSError):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            outcome = TrainingOutcome(code, step, reason, tuple(seats))
            draft.write_bytes(msgspec.json.encode(outcome) + b"\n")
            draft.replace(target)

    def ended(self) -> TrainingOutcome | None:
        try:
            return msgspec.json.decode(read_plain(self.path / "outcome"), type=TrainingOutcome)
        except (OSError, *UNREADABLE):
            return None


class _NothingWritten:
    """A place at which nothing is left for late processes and observers."""

    def other_secret(self) -> bytes | None:
        return None

    def holders(self, me: Peer) -> tuple[Peer, ...] | None:
        return ()

    def enter(self, peer: Peer) -> None:
        return

    def leave(self, peer: Peer) -> None:
        return

    def outcome(self, code: int, step: int, reason: str, seats: Sequence[int] = ()) -> None:
        return

    def ended(self) -> TrainingOutcome | None:
        return None


class AddressList(_NothingWritten):
    """No shared file system: every seat listens where all expect it."""

    def __init__(self, addresses: list[tuple[str, int]], secret: str) -> None:
        """
        Args:
            addresses: host and port of each seat, by seat.
            secret: hex.

        Raises:
            UsageError: no secret.
        """
        if not secret:
            raise UsageError("SRES_MEET=peers:… needs SRES_SECRET, the same on every node")
        self._addresses = addresses
        self._secret = _hex(secret, "SRES_SECRET")

    def secret(self) -> bytes:
        return self._secret

    def port(self, seat: int) -> int:
        return self._addresses[seat][1] if 0 <= seat < len(self._addresses) else 0

    def others(self) -> list[tuple[str, str, int]]:
        return [("", host, port) for host, port in self._addresses]


class SingleProcess(_NothingWritten):
    """A world of one: no other is looked for, and nothing is written down."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def secret(self) -> bytes:
        return self._secret

    def port(self, seat: int) -> int:
        return 0

    def others(self) -> list[tuple[str, str, int]]:
        return []


def rendezvous_at(where: str, secret: str = "") -> Rendezvous:
    """``dir:PATH``, ``peers:HOST:PORT,HOST:PORT,…``, or ``alone``.

    Raises:
        UsageError: neither, or it cannot be used.
    """
    kind, _, rest = where.partition(":")
    if kind == "dir" and rest:
        return SharedDirectory(Path(rest).absolute(), secret)
    if kind == "peers" and rest:
        return AddressList([_address(word) for word in rest.split(",")], secret)
    if where == "alone":
        return SingleProcess()
    raise UsageError(f"SRES_MEET={where!r}: write dir:PATH or peers:HOST:PORT,HOST:PORT,…")


def shared_home(environment: Mapping[str, str]) -> str:
    """Return the shared directory of a supervised srun, or of a run that a user gives one; empty:
    none is named.

    Args:
        environment: of a launcher or a rank.

    Raises:
        UsageError: this is a lent node, and its srun has ended, which removed the directory. A
            process that is still starting would make it anew, and it would stay.
    """
    home = environment.get("SRES_DIR", "")
    if home and environment.get(LENT) == "1":
        try:
            Path(home).stat()
        except FileNotFoundError:
            raise UsageError(f"{home} is gone: the srun that started this has ended") from None
        except OSError:
            pass  # it cannot be seen just now
    return home


def next_training(directory: Path, name: str) -> tuple[Path, Path]:
    """Return the place of the first training of a step that one part of it has not done yet, and
    the file that is to say that it has: a script may do several, one after the other.

    Args:
        directory: of the first one; the others lie beside it.
        name: of the part, and of the step: one that joins begins with the first training, which
            is over for it at once.
    """
    number, found = 0, directory
    while (passed := found / "passed" / name).exists():
        number += 1
        found = directory.with_name(f"{directory.name}.{number}")
    with contextlib.suppress(OSError):
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found, passed


def note_passed(passed: Path | None) -> None:
    """Note that a training has ended well here, by `next_training`'s file."""
    if passed is not None:
        with contextlib.suppress(OSError):
            passed.parent.mkdir(mode=0o700, exist_ok=True)
            passed.touch()


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Leave no draft behind: on a full disk, one is made, and is empty. An error names it."""
    try:
        yield path
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _changed_at(path: Path) -> float:
    """Return when a file was written last; long ago: it was removed meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("-inf")


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _address(word: str) -> tuple[str, int]:
    host, _, port = word.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"SRES_MEET: {word!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _hex(text: str, where: str | Path) -> bytes:
    try:
        value = bytes.fromhex(text.strip())
    except ValueError:
        value = b""
    if len(value) < 16:
        raise UsageError(f"{where}: the training's secret must be at least 32 hexadecimal digits")
    return value
