"""Tell whether another user could have written what a daemon believes or runs.

Trusted are root, the daemon's own user, and the owner of this very program: who can change that can
do all that it does.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_resilience.errors import ConfigError

if TYPE_CHECKING:
    from slurm_resilience.config import Config

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def trusted_users() -> frozenset[int]:
    """Return the user ids whose files may be believed."""
    return frozenset({0, os.geteuid(), Path(__file__).stat().st_uid})


NO_USERS = frozenset[int]()


def untrusted(path: Path, also: frozenset[int] = NO_USERS) -> str:
    """Return why a program may not be run, or a file not be believed: another user could have
    written it, or put another one in its place. A link counts as what it leads to.

    Args:
        path: of the file.
        also: users who are trusted as well.

    Raises:
        OSError: it is not there, or cannot be looked at.
    """
    target, users = path.resolve(strict=True), trusted_users() | also
    for one in dict.fromkeys((path, path.parent, target, target.parent)):
        status = one.stat()
        if status.st_uid not in users:
            return f"{one} belongs to user {status.st_uid}, not to root"
        if status.st_mode & _OTHERS:
            return f"{one} may be written by others than its owner: chmod go-w"
    for one in dict.fromkeys((*path.absolute().parents, *target.parents)):
        status = one.stat()
        if status.st_uid not in users:
            return f"{one} belongs to user {status.st_uid}, not to root"
        if status.st_mode & stat.S_IWOTH and not _is_sticky(status):
            return f"{one} may be written by everyone: chmod o-w"
    return ""


def untrusted_state(directory: Path, also: frozenset[int] = NO_USERS) -> str:
    """Return why a directory may not hold what a daemon remembers: another user could have put it
    there, or changes what is in it. One that is not there yet will be made.

    Args:
        directory: it holds the state.
        also: users who are trusted as well.

    Raises:
        OSError: it cannot be looked at.
    """
    target, users = directory.resolve(), trusted_users() | also
    is_leaf = True
    for one in dict.fromkeys((directory, target, *directory.absolute().parents, *target.parents)):
        try:
            link, status = one.lstat(), one.stat()
        except FileNotFoundError:
            continue
        if not users.issuperset((link.st_uid, status.st_uid)):
            owner = link.st_uid if link.st_uid not in users else status.st_uid
            return f"{one} belongs to user {owner}, not to root: chown it"
        # A group may be root's own, or the daemon's.
        others = stat.S_IWOTH
        if status.st_gid not in (0, os.getegid()):
            others |= stat.S_IWGRP
        is_open = bool(status.st_mode & others)
        # In a sticky one (/tmp) each user can exchange his own alone. But where nothing is there
        # yet, any user may be the first to make it.
        if is_open and (is_leaf or not _is_sticky(status)):
            here = "" if one in (directory, target) else f", in which {directory} is to be,"
            return f"{one}{here} may be written by other users: chmod go-w"
        is_leaf = False
    return ""


def refuse_users(directory: Path) -> None:
    """Refuse a directory in which a user could put a link in the place of one of our files: root
    would write into the file that it leads to. A sticky one (/tmp) is no better.

    Raises:
        OSError: it is not there, or one of a user's, or of all users; the text says which.
    """
    status = directory.stat()
    if status.st_uid not in trusted_users():
        raise PermissionError(errno.EPERM, f"{directory} belongs to user {status.st_uid}")
    if status.st_mode & stat.S_IWOTH:
        text = f"{directory} may be written by all users (chmod o-w)"
        raise PermissionError(errno.EPERM, text)


def refuse_at_start(
    states: Iterable[tuple[str, str]],
    files: Iterable[tuple[str, str]] = (),
    also: frozenset[int] = NO_USERS,
) -> None:
    """Refuse to start with what another user could have forged.

    Args:
        states: keys of the configuration and the directories that they name.
        files: the same of files that are believed, and of programs, also by a name on PATH. Of one
            that is not there its user will tell.
        also: users who are trusted as well.

    Raises:
        ConfigError: one line names it, and says what to do.
    """
    for key, name in states:
        if name:
            try:
                fault = untrusted_state(Path(name), also)
            except OSError as error:
                fault = f"{name} cannot be looked at: {error.strerror}"
            if fault:
                raise ConfigError(
                    f"{key}: {fault}, or name a directory that root alone can write: another user "
                    "could forge what is kept there"
                )
    for key, name in files:
        found = name if name.startswith("/") else shutil.which(name) if name else None
        if found is None:
            continue
        try:
            fault = untrusted(Path(found), also)
        except OSError:
            continue
        if fault:
            raise ConfigError(f"{key}: {fault}; another user could put his own in its place")


def refuse_forged_controller(config: Config, file: Path, also: frozenset[int] = NO_USERS) -> None:
    """Refuse to start sresctld with what a user could have forged: the journal, and what it runs.

    Args:
        config: sres.toml.
        file: from which it was read.
        also: users who are trusted as well.

    Raises:
        ConfigError: one line says what it is.
    """
    files = [("the configuration", str(file.absolute()))]
    files += [("replace.program", word) for word in config.replace.program[:1]]
    for name, sink in config.sinks.items():
        files += [(f"sinks.{name}.command", word) for word in sink.command[:1]]
        files += [(f"sinks.{name}.token_file", sink.token_file)]
    refuse_at_start([("controller.state_dir", config.controller.state_dir)], files, also)


def _is_sticky(status: os.stat_result) -> bool:
    """Tell whether a directory is like /tmp: no user replaces what belongs to another."""
    return stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
