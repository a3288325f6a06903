"""Find and read the dumps of a training: a file for each rank, in one directory or one for each
node."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_resilience.errors import NotFound, UsageError
from slurm_resilience.flight.rank_dump import RankDump, UnreadableDump, read_dump

MAX_FILE_BYTES = 64 << 20
"""A dump of 2,000 calls with their stacks has about 5 MB."""
MAX_FILES = 100_000
_NUMBER_AT_END = re.compile(r".*?([0-9]{1,6})(?:\.(?:pickle|pkl|json|bin|dump))?", re.IGNORECASE)


class UnreadFile(msgspec.Struct, frozen=True):
    """A file that is left out, and why."""

    file: str
    reason: str


class DumpSet(NamedTuple):
    """The dumps that were read, by rank, and the files that were left out."""

    dumps: dict[int, RankDump]
    unread: tuple[UnreadFile, ...]


def read_dumps(directory: Path) -> DumpSet:
    """Return the dumps of a directory.

    A rank is the number at the end of its file's name, as torch writes it
    (`nccl_trace_rank_12`). Files in a sub-directory are of the node with its name. Of two files of
    a rank the newer one counts.

    Raises:
        NotFound: there is no such directory.
        UsageError: it cannot be read.
    """
    dumps: dict[int, RankDump] = {}
    written: dict[int, float] = {}
    unread = []
    for path, node in _files(directory):
        name = str(path.relative_to(directory))
        match = _NUMBER_AT_END.fullmatch(path.name)
        if match is None:
            unread.append(UnreadFile(name, "its name does not end with a rank"))
            continue
        rank = int(match[1])
        try:
            data, changed = _content(path)
            if changed < written.get(rank, 0.0):
                unread.append(UnreadFile(name, f"there is a newer one of rank {rank}"))
                continue
            dumps[rank] = read_dump(data, rank, node)
            written[rank] = changed
        except (UnreadableDump, UsageError) as error:
            unread.append(UnreadFile(name, str(error)))
        except OSError as error:
            unread.append(UnreadFile(name, f"cannot be read: {error.strerror}"))
    return DumpSet(dumps, tuple(unread))


def _files(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files, each with the node that its place names; hidden ones are left out."""
    try:
        entries = _sorted(directory)
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), ""
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                for inner in _sorted(Path(entry.path)):
                    if not inner.is_dir(follow_symlinks=False):
                        yield Path(inner.path), entry.name
    except FileNotFoundError:
        raise NotFound(f"{directory} does not exist") from None
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}") from None


def _sorted(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as found:
        entries = [entry for entry in found if not entry.name.startswith(".")]
    if len(entries) > MAX_FILES:
        raise UsageError(f"{directory} has more than {MAX_FILES} files")
    return sorted(entries, key=lambda entry: entry.name)


def _content(path: Path) -> tuple[bytes, float]:
    """Return a file's content, and when it was written."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError("it is no regular file")
        if about.st_size > MAX_FILE_BYTES:
            raise UsageError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        return opened.read(MAX_FILE_BYTES), about.st_mtime


def nodes_of_ranks(dumps: dict[int, RankDump], nodes: tuple[str, ...]) -> dict[int, str]:
    """Return the node of each rank: the ranks follow each other, as many on each node.

    Raises:
        UsageError: the ranks cannot be spread so.
    """
    ranks = {rank for dump in dumps.values() for key in dump.calls for rank in key.ranks}
    world = max([*ranks, *dumps], default=-1) + 1
    if world % len(nodes):
        raise UsageError(f"{world} ranks are not as many on each of {len(nodes)} nodes")
    per_node = world // len(nodes)
    return {rank: nodes[rank // per_node] for rank in range(world)}
