"""Let every user reach a directory that lies in a private home, in one mount namespace.

A home of mode 0700 keeps all others from a checkout in it, and so from the commands that Slurm runs
as them. Nothing is changed in the home: each directory on the way is covered by a tmpfs with the
same entries, which others may pass but not list. What root starts in the namespace sees that; the
rest of the machine does not.

    python -m slurm_resilience.lab.reachable COMMAND…

runs a command with this package, its virtual environment and its Python reachable.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from slurm_resilience.lab import programs
from slurm_resilience.lab.machines import linux

_PASS = stat.S_IXOTH
_MODE = "711"


def closed(paths: Iterable[Path]) -> list[Path]:
    """Return the directories on the way to these paths that only their owner may pass."""
    ways = {parent for path in paths for way in (path, path.resolve()) for parent in way.parents}
    return sorted(directory for directory in ways if not directory.stat().st_mode & _PASS)


def open_way(paths: Iterable[Path]) -> None:
    """Let everyone in this mount namespace, which must be private, pass to these paths."""
    paths = list(paths)
    # One after the other: below a directory that has been covered, the next is another file.
    for directory in closed(paths):
        _cover(directory)


def _cover(directory: Path) -> None:
    covered = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208  # names, not paths
        owner = directory.stat()
        options = f"mode={_MODE},uid={owner.st_uid},gid={owner.st_gid}"
        linux.mount("tmpfs", str(directory), "tmpfs", linux.MS_NOSUID, options)
        for name in names:
            # One that cannot be shown (a socket in the middle of its removal) is left out.
            with contextlib.suppress(OSError):
                show(Path(f"/proc/self/fd/{covered}/{name}"), directory / name)
    finally:
        os.close(covered)


def show(entry: Path, target: Path, recursive: bool = True) -> None:
    """Show a file, a directory or a link at a path that does not exist yet."""
    mode = entry.lstat().st_mode
    if stat.S_ISLNK(mode):
        target.symlink_to(entry.readlink())
        return
    if stat.S_ISDIR(mode):
        target.mkdir()
    else:
        target.touch()
    linux.bind(entry, target, recursive=recursive)


def main() -> None:
    """Run the command of the arguments; in a namespace of its own where the way is closed."""
    command = sys.argv[1:]
    own = programs.own_directories()
    if os.geteuid() == 0 and closed(own):
        here = Path.cwd()
        linux.unshare(linux.NEWNS)
        linux.make_mounts_private()
        open_way(own)
        os.chdir(here)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
