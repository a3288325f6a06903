"""The few Linux calls a lab is made of, which Python 3.11 does not offer: namespaces and mounts.

Only the standard library is loaded here: a node's init starts from this file.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

NEWTIME = 0x80
NEWNS = 0x20000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWPID = 0x20000000
NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000

_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_RB_AUTOBOOT = 0x1234567
# The kernel's fixed inode number of the machine's own PID namespace (PROC_PID_INIT_INO).
_MACHINE_PID_NAMESPACE = 0xEFFFFFFC

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what)


def unshare(flags: int) -> None:
    """Move the caller (its future children, for PID and time) into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    """Move the caller into namespaces: of a process (a pidfd), or a namespace file."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(result, target)


def unmount(target: str | Path) -> None:
    """Take away the topmost mount; who has a file of it open keeps that. Unlike umount(8) it needs
    no /proc."""
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), str(target))


def bind(source: str | Path, target: str | Path, recursive: bool = False) -> None:
    """Show ``source`` at ``target`` too."""
    mount(str(source), str(target), flags=MS_BIND | (MS_REC if recursive else 0))


def make_mounts_private() -> None:
    """From here on no mount of this namespace reaches any other.

    In a chroot whose root is no mount point, that root becomes the namespace's own: only then do
    the programs that enter the namespace see what is seen here.
    """
    try:
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        # Entering a mount namespace, even one's own, leads to its root, out of the chroot.
        with Path("/proc/self/ns/mnt").open("rb") as namespace:
            setns(namespace.fileno(), NEWNS)
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        os.fchdir(root)
    finally:
        os.close(root)
    directory = os.getcwd()  # noqa: PTH109  # no path's business: the one way to ask the kernel
    bind(directory, directory, recursive=True)
    pivot(directory)


def mount_proc(root: str = "") -> None:
    """Let /proc show the processes of this PID namespace."""
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def pivot(root: str) -> None:
    """Make a mount the root of this mount namespace; what was the root before is not seen."""
    os.chdir(root)
    # The new root on top of the old one, and then the old one away (see pivot_root(2)).
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def set_host_name(name: str) -> None:
    """sethostname(2)."""
    raw = name.encode()
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def uptime() -> float:
    """Seconds since this machine (or this time namespace) booted."""
    return float(Path("/proc/uptime").read_text().split()[0])


def set_boot_time_to_now() -> None:
    """Give the caller's future children a new time namespace whose machine has just booted.

    slurmd tells slurmctld when its machine booted; without this a power cycle would be invisible.
    """
    seconds = int(uptime())
    unshare(NEWTIME)
    Path("/proc/self/timens_offsets").write_text(f"boottime -{seconds} 0\n")


def new_network() -> int:
    """Open a file that keeps a new, empty network namespace alive."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(NEWNET)
        try:
            return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            setns(own, NEWNET)
    finally:
        os.close(own)


def reboot_this_node() -> None:
    """reboot(2) for a PID namespace: ends its pid 1 with SIGHUP. Never the machine.

    Raises:
        OSError: the caller is not on a lab node, or the kernel refused.
    """
    # A container has a PID namespace of its own too, and would end: pid 1 must be a node's.
    machine = Path("/proc/self/ns/pid").stat().st_ino == _MACHINE_PID_NAMESPACE
    if machine or b"slurm_resilience.lab.machines.init" not in Path("/proc/1/cmdline").read_bytes():
        raise PermissionError("not inside a lab node: this would reboot the machine")
    _check(_libc.reboot(ctypes.c_int(_RB_AUTOBOOT)), "reboot")
