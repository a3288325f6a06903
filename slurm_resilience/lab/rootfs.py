"""Slurm out of another root directory: a newer release beside the machine's own.

The controller and the nodes see that root as theirs (on an overlay: nothing is written to it), with
the machine's other top-level directories, /run included, shown in it, so that checkouts, virtual
environments and home directories are where they are outside.
"""

from __future__ import annotations

from pathlib import Path

from slurm_resilience.lab import linux

# What a root directory brings itself; everything else is the machine's.
_BROUGHT = "bin boot dev etc lib lib32 lib64 libx32 lost+found proc run sbin sys usr var"
_ITS_OWN = frozenset(_BROUGHT.split(" "))


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
    for directory in (Path("/run"), Path("/run/sres-lab"), Path("/run/munge"), Path("/run/mysqld")):
        if directory.is_dir():
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
    return root


def _show(directory: Path, root: Path, recursive: bool, at: str = "") -> None:
    target = root / (at or directory.relative_to("/"))
    target.mkdir(parents=True, exist_ok=True)
    linux.bind(directory, target, recursive=recursive)
