"""Find the scripts of a directory, in their order, and refuse those that others may write.

A set is every file called ``NN-name…``, and before them HyperPod's ``on_create.sh``, if there.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.errors import UsageError

ON_CREATE = "on_create.sh"
SCRIPT = re.compile(r"[0-9]{2}-[A-Za-z0-9._-]+")
# Left behind by editors and package managers.
_LEFTOVERS = ("~", ".bak", ".dpkg-old", ".dpkg-new", ".dpkg-dist", ".rpmsave", ".rpmnew", ".swp")
_READ_BYTES = 1 << 20
"""A larger file beside ``on_create.sh`` (a package, say) counts by its size and time alone."""
MAX_FILES = 10_000
_SHELL = "/bin/bash"


@dataclass(frozen=True)
class LifecycleScript:
    """One script of a set."""

    path: Path
    digest: str
    """SHA-256 of its content; that of ``on_create.sh`` covers all that lies beside it."""
    is_executable: bool = True

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def runs_once(self) -> bool:
        """It runs once for each disk, and not with every boot."""
        return self.name == ON_CREATE

    def argv(self, node: str) -> list[str]:
        """Return how it is called. HyperPod gives its script no argument, and no execute bit."""
        if not self.runs_once:
            return [str(self.path), node]
        return [str(self.path)] if self.is_executable else [_SHELL, str(self.path)]

    @property
    def working_directory(self) -> str:
        """HyperPod's script finds ``provisioning_parameters.json`` beside itself."""
        return str(self.path.parent) if self.runs_once else "/"


def scripts_of(directory: Path) -> list[LifecycleScript]:
    """List the scripts of a directory in their order, with those that cannot be executed.

    Raises:
        UsageError: it cannot be read, or another user could have written a script.
    """
    try:
        entries = sorted(directory.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}; name a directory of scripts") from None
    try:
        refuse_unsafe(directory)
        found = [_numbered(entry) for entry in entries if _is_numbered(entry)]
        if (directory / ON_CREATE).is_file():
            found.insert(0, _on_create(directory))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; nothing was run") from None
    return found


def refuse_unsafe(path: Path) -> None:
    """Refuse what another user than root could have written.

    Raises:
        UsageError: it could; one line says which file, and what to do.
    """
    status = path.stat()
    _refuse_owner(path, status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{path} may be written by others than its owner, so nothing was run; chmod go-w"
        )
    # The directories on the way to it too, and to what it links to: their owner could put another
    # file in its place.
    for folder in dict.fromkeys((*path.absolute().parents, *path.resolve(strict=True).parents)):
        status = folder.stat()
        _refuse_owner(folder, status)
        # In a sticky one (/tmp) each can rename his own alone. A group may be root's own (staff).
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise UsageError(
                f"{folder}, in which {path.name} lies, may be written by all users, so nothing was "
                "run; chmod o-w"
            )


def _refuse_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"{path} belongs to user {status.st_uid}: scripts are run as root, so nothing was run; "
            "chown it to root"
        )


def _is_numbered(entry: Path) -> bool:
    if not SCRIPT.fullmatch(entry.name) or entry.name.endswith(_LEFTOVERS):
        return False
    if entry.is_symlink() and not entry.exists():
        # Left out, the node would join without it.
        raise UsageError(f"{entry} is a link to nothing, so nothing was run; remove or mend it")
    return entry.is_file()


def _numbered(path: Path) -> LifecycleScript:
    refuse_unsafe(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return LifecycleScript(path, digest, os.access(path, os.X_OK))


def _on_create(directory: Path) -> LifecycleScript:
    path, digest = directory / ON_CREATE, hashlib.sha256()
    for file in _files_below(directory):
        status = file.stat()
        refuse_unsafe(file)
        digest.update(str(file.relative_to(directory)).encode() + b"\0")
        if status.st_size <= _READ_BYTES:
            digest.update(file.read_bytes())
        else:
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return LifecycleScript(path, digest.hexdigest(), os.access(path, os.X_OK))


def _files_below(directory: Path) -> Iterator[Path]:
    """Yield the files that belong to ``on_create.sh``; numbered scripts have a digest each."""
    count = 0
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            file = Path(folder) / name
            is_top = Path(folder) == directory
            if not file.is_file() or (is_top and _is_numbered(file)):
                continue
            count += 1
            if count > MAX_FILES:
                raise UsageError(f"{directory} has more than {MAX_FILES} files; nothing was run")
            yield file
