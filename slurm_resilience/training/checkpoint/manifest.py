"""The manifest: what a finished checkpoint consists of, and whether it is still all there.

The checksum is CRC-32 (zlib): it catches flipped bits, cut files and swapped blocks, and is read
faster than any disk (6.3 GiB/s here; blake2b 1.1, sha256 1.9). It is no defence against a forger.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

FILE = "manifest.json"
_CHUNK_BYTES = 8 << 20


class ManifestEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """Written last, so that a directory that has one was complete."""

    step: int
    world: int
    """Ranks that wrote it; any number may load it."""
    files: dict[str, ManifestEntry]
    torch: str
    time: float
    """Seconds since the epoch."""


class Damaged(Exception):
    """A checkpoint is not what its manifest says. The message begins with the file."""


Print = tuple[tuple[str, int, int, int], ...]
"""Name, size, mtime (ns) and inode of each file: unchanged as long as the files are untouched."""


def entry(path: Path) -> ManifestEntry:
    """Read a file and describe it.

    Raises:
        OSError: it cannot be read.
    """
    size = checksum = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return ManifestEntry(size, checksum)


def write(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, and make it and the directory's names last.

    Raises:
        OSError: the disk is full, or gone.
    """
    path = directory / FILE
    with path.open("wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory last.

    Raises:
        OSError: as fsync.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(directory: Path, step: int) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        Damaged: it is missing, unreadable, or speaks of another step.
    """
    path = directory / FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{path}: {error}") from None
    if manifest.step != step:
        raise Damaged(f"{path}: is of step {manifest.step}")
    if any("/" in name or name in ("", ".", "..") for name in manifest.files):
        raise Damaged(f"{path}: names a file outside of the checkpoint")
    return manifest


def fingerprint(directory: Path, manifest: Manifest) -> Print:
    """Look at every file without reading it.

    Raises:
        Damaged: one is missing, or has another size.
    """
    seen = []
    for name, expected in sorted(manifest.files.items()):
        path = directory / name
        try:
            found = path.stat()
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        if found.st_size != expected.size:
            raise Damaged(f"{path}: {found.st_size} bytes instead of {expected.size}")
        seen.append((name, found.st_size, found.st_mtime_ns, found.st_ino))
    return tuple(seen)


def verify(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read files and compare them with the manifest.

    Raises:
        Damaged: one cannot be read, or has other content.
    """
    for name in names:
        path = directory / name
        try:
            found = entry(path)
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        if found != manifest.files[name]:
            what = "is cut" if found.size < manifest.files[name].size else "has other content"
            raise Damaged(f"{path}: {what} (CRC-32 or size differ from the manifest)")
