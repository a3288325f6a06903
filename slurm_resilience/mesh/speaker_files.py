"""The rank that speaks for each node, as it is written down: ``speakers/NODE.json``.

Where all ranks start at once, they need not find out by talking who speaks: the first one of a node
that writes the file does. And a speaker finds the others in one short listing, instead of among all
ranks. It is a hint: what is wrong or missing here is found by talking, as without it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from slurm_resilience.mesh.model import Peer, Speakers
from slurm_resilience.wire.frames import UNREADABLE

log = logging.getLogger("sres.mesh")

NAME_LETTERS = 100
"""The longest part of a node's name in a file's."""


class SpeakerFiles:
    """The files of all nodes."""

    def __init__(self, place: Path) -> None:
        """
        Args:
            place: the directory; made when it is needed.
        """
        self._place = place

    def claim(self, me: Peer) -> None:
        """Write that a process speaks for its node, if none does.

        Raises:
            OSError: that cannot be written down now.
        """
        target = self._file(me.node)
        if not target.exists():
            with self._draft(me) as draft, contextlib.suppress(FileExistsError):
                os.link(draft, target)  # the first one wins, and half of it is never read

    def read(self, me: Peer) -> Speakers:
        """Return what is written down, as a process sees it.

        Raises:
            OSError: it cannot be read.
        """
        here = _read(self._file(me.node))
        if here is not None and here.id != me.id and me.incarnation == 0:
            return Speakers(here)  # it looks for the others
        is_own = here is not None and here.id == me.id
        since = _appeared_at(self._file(me.node)) if is_own else None
        before: list[Peer] = []
        after: list[Peer] = []
        with os.scandir(self._place) as entries:
            paths = sorted(entry.path for entry in entries if entry.name.endswith(".json"))
        for path in map(Path, paths):
            peer = _read(path)
            if peer is not None and peer.node != me.node:
                # By the file system's clock, in whose steps several may come: those are dialed.
                is_late = since is not None and _appeared_at(path) > since
                (after if is_late else before).append(peer)
        return Speakers(here, tuple(before), tuple(after))

    def write(self, me: Peer) -> None:
        """Write that a process speaks for its node now.

        Raises:
            OSError: that cannot be written down now.
        """
        with self._draft(me) as draft:
            draft.replace(self._file(me.node))

    def keep(self, me: Peer) -> None:
        """Write it again if it is gone. Raises what `write` does."""
        if not self._file(me.node).exists():
            self.write(me)

    def leave(self, me: Peer) -> None:
        """Take the word of a process that has ended back."""
        target = self._file(me.node)
        written = _read(target)
        if written is not None and written.id == me.id:
            with contextlib.suppress(OSError):
                target.unlink()

    def _file(self, node: str) -> Path:
        return self._place / f"{file_name(node)}.json"

    @contextlib.contextmanager
    def _draft(self, me: Peer) -> Iterator[Path]:
        self._place.mkdir(mode=0o700, exist_ok=True)
        draft = self._place / f".{me.id}"
        try:
            draft.write_bytes(msgspec.json.encode(me))
            yield draft
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()


class SpeakerEntry:
    """The word of one process on itself there."""

    def __init__(self, files: SpeakerFiles | None, me: Peer) -> None:
        """
        Args:
            files: None: there are none where this training meets.
            me: this process.
        """
        self._files = files
        self._me = me
        self._speaks = False
        self._is_written = False

    def claim(self) -> Speakers | None:
        """Have this process speak for its node, if none does, as far as is written down; return
        what is written then. None: that cannot be known, or this process is not one of the first.
        """
        if self._files is None or self._me.incarnation > 0:
            return None
        try:
            self._files.claim(self._me)
        except OSError as error:
            log.debug("it cannot be written down who speaks for a node: %s", error)
            return None
        found = self.read()
        if found is None or found.here is None:
            return None
        self._speaks = self._is_written = found.here.id == self._me.id
        return found

    def read(self) -> Speakers | None:
        """Return what is written down of speakers; None: that cannot be known."""
        if self._files is None:
            return None
        try:
            return self._files.read(self._me)
        except OSError:
            return None

    def speaks(self) -> bool:
        """Note that this process speaks for its node; tell whether that has to be written down."""
        is_new, self._speaks = not self._speaks, True
        return is_new

    def write(self) -> None:
        """Have it written down, where this process speaks.

        Raises:
            OSError: it cannot be.
        """
        if self._files is not None and self._speaks:
            (self._files.keep if self._is_written else self._files.write)(self._me)
            self._is_written = True


def file_name(node: str) -> str:
    """Return a node's name as part of a file's."""
    return quote(node, safe="")[:NAME_LETTERS]


def whole_name(part: str) -> str | None:
    """Return the node that a part of a file's name names; None: it is too long for that."""
    return unquote(part) if len(part) < NAME_LETTERS else None


def read_plain(path: Path) -> bytes:
    """Return what is in a file.

    Raises:
        OSError: it cannot be read; or it is a pipe, which is not waited for, or a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _read(path: Path) -> Peer | None:
    with contextlib.suppress(OSError, *UNREADABLE):
        return msgspec.json.decode(read_plain(path), type=Peer)
    return None


def _appeared_at(path: Path) -> int:
    """Return when a file got its name: what is in it was written before, and another one may have
    come, and looked in vain, in between."""
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return 0
