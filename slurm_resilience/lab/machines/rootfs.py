"""Slurm out of another root directory: a newer release beside the machine's own.

The controller and the nodes see that root as theirs (on an overlay: nothing is written to it), with
the machine's other top-level directories, /run included, shown in it, so that checkouts, virtual
environments and home directories are where they are outside. So is the Python that runs this: its
programs are the lab's daemons too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from slurm_resilience.lab.machines import linux

# What a root directory brings itself; everything else is the machine's.
_BROUGHT = "bin boot dev etc lib lib32 lib64 libx32 lost+found proc run sbin sys usr var"
_ITS_OWN = frozenset(_BROUGHT.split(" "))
DATABASE_DIRECTORIES = ("mysqld", "mariadbd")
"""Below /run: where a MariaDB client library looks for "localhost". Newer ones take the second."""


def mount_root(source: Path, lab: Path) -> Path:
    """Build the lab's root directory; where it is. After the lab's own /run has been mounted."""
    base = lab / "rootfs"
    base.mkdir()
    # The layer that takes the writes; a tmpfs, since an overlay cannot lie on every file system.
    linux.mount("tmpfs", str(base), "tmpfs", linux.MS_NOSUID, "mode=755")
    root, upper, work = (base / part for part in ("root", "upper", "work"))
    for part in (root, upper, work):
        part.mkdir()
    layers = f"lowerdir={source},upperdir={upper},workdir={work}"
    linux.mount("overlay", str(root), "overlay", data=layers)
    for entry in sorted(Path("/").iterdir()):
        if entry.name not in _ITS_OWN and entry.is_dir() and not entry.is_symlink():
            _show(entry, root, recursive=entry not in lab.parents)
    for name in ("dev", "sys"):
        _show(Path("/") / name, root, recursive=True)
    (root / "proc").mkdir(exist_ok=True)
    # One by one: all of it would show this very directory inside itself.
    for name in ("", "sres-lab", "munge", *DATABASE_DIRECTORIES):
        if (directory := Path("/run") / name).is_dir():
            _show(directory, root, recursive=False)
    if not (root / lab.relative_to("/")).is_dir():
        _show(lab, root, recursive=False)
    for source_file, target in (
        (lab / "etc" / "hosts", "etc/hosts"),
        (lab / "passwd", "etc/passwd"),
        (lab / "group", "etc/group"),
    ):
        (root / target).touch()
        linux.bind(source_file, root / target)
    (root / "etc" / "hostname").touch()
    _show(lab / "etc", root, recursive=False, at="etc/slurm")
    _show_python(root)
    return root


def _show_python(root: Path) -> None:
    """Show the running Python at its own place: interpreter, modules, shared libraries.

    The root's own python3, if it has one, knows nothing of this environment.
    """
    for link in _links_to(Path(sys.executable)):
        if _is_brought(link):
            target = root / link.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.symlink_to(link.readlink())
    interpreter = Path(sys.executable).resolve()
    modules = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    shown: list[Path] = []
    for directory in sorted(modules):
        if _is_brought(directory) and not any(above in directory.parents for above in shown):
            _show(directory, root, recursive=False)
            shown.append(directory)
    extensions = [file for directory in shown for file in directory.rglob("*.so")]
    # A Python of its own place is there with all that lies below it; its libraries may be Debian's.
    built_in = [directory for directory in modules if directory.name == "lib-dynload"]
    extensions += [file for directory in built_in for file in directory.rglob("*.so")]
    for file in sorted({interpreter, *_libraries([interpreter, *extensions])}):
        target = root / file.relative_to("/")
        # A newer release of a library serves its older callers; the interpreter must be this one.
        if _is_brought(file) and (file == interpreter or not target.exists()):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.touch()
            linux.bind(file, target)


def _links_to(path: Path) -> Iterator[Path]:
    """Every symbolic link on the way to a file."""
    while path.is_symlink():
        yield path
        path = Path(os.path.normpath(path.parent / path.readlink()))


def _is_brought(path: Path) -> bool:
    return len(path.parts) > 1 and path.parts[1] in _ITS_OWN


def _libraries(files: list[Path]) -> set[Path]:
    """Return the shared libraries that programs and modules load, as the machine finds them."""
    done = subprocess.run(
        ["ldd", *map(str, files)], capture_output=True, text=True, errors="replace", check=False
    )
    words = (line.partition(" => ")[2].split() for line in done.stdout.splitlines())
    return {Path(word[0]) for word in words if word and word[0].startswith("/")}


def _show(directory: Path, root: Path, recursive: bool, at: str = "") -> None:
    target = root / (at or directory.relative_to("/"))
    target.mkdir(parents=True, exist_ok=True)
    linux.bind(directory, target, recursive=recursive)
