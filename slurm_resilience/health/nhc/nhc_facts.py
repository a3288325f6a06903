"""Read what NHC's checks ask for, below a sysroot."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import CheckContext
from slurm_resilience.health.nhc.nhc_lines import NhcLine

MAX_PROCESSES = 65536


class NhcMount(NamedTuple):
    source: str
    point: str
    kind: str
    options: str


class NhcSpace(NamedTuple):
    """A file system, as df shows it to a plain user: bytes and inodes."""

    total: int
    used: int
    free: int
    inodes: int
    inodes_free: int


class NhcProcess(NamedTuple):
    name: str
    command: str
    user: str


class NhcPort(NamedTuple):
    """One port of an InfiniBand device; ``rate`` in Gb/s."""

    device: str
    number: str
    active: bool
    rate: int


class NhcFile(NamedTuple):
    """The letters of test(1) that hold for a path."""

    path: str
    holds: str


class NhcFacts(NamedTuple):
    """All that the lines of one node ask for."""

    mounts: tuple[NhcMount, ...] = ()
    space: dict[str, NhcSpace] = {}  # noqa: RUF012  # never changed
    memory: dict[str, int] = {}  # noqa: RUF012  # bytes, by the names of /proc/meminfo
    sockets: int = 0
    cores: int = 0
    threads: int = 0
    net_devices: frozenset[str] = frozenset()
    ports: tuple[NhcPort, ...] = ()
    processes: tuple[NhcProcess, ...] = ()
    load: tuple[float, ...] = ()
    files: tuple[NhcFile, ...] = ()


def read_facts_for(lines: Iterable[NhcLine], context: CheckContext) -> NhcFacts:
    """Return the facts of this node; paths that lines name are looked at, no others."""
    checks = [line.words for line in lines if line.words and not line.problem]
    named = {words[0] for words in checks}
    mounts = _mounts(context)
    wanted = {w for words in checks if words[0].startswith("check_fs_") for w in words[1:]}
    points = [one.point for one in mounts if one.point in wanted or one.source in wanted]
    paths = {w for words in checks if words[0] == "check_file_test" for w in words[1:]}
    sockets, cores, threads = _processors(context)
    return NhcFacts(
        mounts,
        {point: space for point in points if (space := _space(context.path(point)))},
        _memory(context),
        sockets,
        cores,
        threads,
        frozenset(path.name for path in context.path("/sys/class/net").glob("*")),
        _ports(context),
        _processes(context) if any(name.startswith("check_ps_") for name in named) else (),
        tuple(float(word) for word in _text(context.path("/proc/loadavg")).split()[:3]),
        tuple(_file(context, path) for path in sorted(paths) if not path.startswith("-")),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _mounts(context: CheckContext) -> tuple[NhcMount, ...]:
    rows = [line.split() for line in _text(context.path("/proc/self/mounts")).splitlines()]
    return tuple(
        NhcMount(*(re.sub(r"\\([0-7]{3})", lambda o: chr(int(o[1], 8)), w) for w in row[:4]))
        for row in rows
        if len(row) >= 4
    )


def _space(path: Path) -> NhcSpace | None:
    try:
        seen = os.statvfs(path)
    except OSError:
        return None
    used = (seen.f_blocks - seen.f_bfree) * seen.f_frsize
    free = seen.f_bavail * seen.f_frsize
    return NhcSpace(seen.f_blocks * seen.f_frsize, used, free, seen.f_files, seen.f_favail)


def _memory(context: CheckContext) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB", _text(context.path("/proc/meminfo")), re.M)
    return {name: int(kib) * 1024 for name, kib in found}


def _processors(context: CheckContext) -> tuple[int, int, int]:
    """Return sockets, cores and threads; a machine that names neither has one socket."""
    sockets, cores, threads = set(), set(), 0
    for block in _text(context.path("/proc/cpuinfo")).split("\n\n"):
        facts = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", block, re.M))
        if "processor" not in facts:
            continue
        threads += 1
        socket = facts.get("physical id", "0")
        sockets.add(socket)
        cores.add((socket, facts.get("core id", facts["processor"])))
    return len(sockets), len(cores), threads


def _ports(context: CheckContext) -> tuple[NhcPort, ...]:
    found = []
    for folder in sorted(context.path("/sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"\d+", _text(folder / "rate"))
        active = "ACTIVE" in _text(folder / "state") and "LinkUp" in _text(folder / "phys_state")
        device = folder.parent.parent.name
        found.append(NhcPort(device, folder.name, active, int(rate[0]) if rate else 0))
    return tuple(found)


def _processes(context: CheckContext) -> tuple[NhcProcess, ...]:
    found = []
    users: dict[int, str] = {}
    for folder in context.path("/proc").glob("[0-9]*"):
        words = _text(folder / "cmdline").rstrip("\0").split("\0")
        uid = re.search(r"^Uid:\s+\d+\s+(\d+)", _text(folder / "status"), re.M)
        if uid is None:
            continue  # it has ended meanwhile
        number = int(uid[1])
        if number not in users:
            users[number] = _user(number)
        # A daemon may write over its words: `sshd: /usr/sbin/sshd -D [listener]`.
        name = words[0].split(" ")[0].rstrip(":") or _text(folder / "comm").strip()
        found.append(NhcProcess(name.rpartition("/")[2], " ".join(words), users[number]))
        if len(found) >= MAX_PROCESSES:
            break
    return tuple(found)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _file(context: CheckContext, name: str) -> NhcFile:
    path = context.path(name)
    holds = "".join(letter for letter, look in _TESTS.items() if look(path))
    return NhcFile(name, holds)


def _has_bit(path: Path, bit: int) -> bool:
    return path.exists() and bool(path.stat().st_mode & bit)


_TESTS: dict[str, Callable[[Path], bool]] = {
    "a": Path.exists,
    "e": Path.exists,
    "f": Path.is_file,
    "d": Path.is_dir,
    "b": Path.is_block_device,
    "c": Path.is_char_device,
    "p": Path.is_fifo,
    "S": Path.is_socket,
    "h": Path.is_symlink,
    "L": Path.is_symlink,
    "r": lambda path: os.access(path, os.R_OK),
    "w": lambda path: os.access(path, os.W_OK),
    "x": lambda path: os.access(path, os.X_OK),
    "s": lambda path: path.exists() and path.stat().st_size > 0,
    "u": lambda path: _has_bit(path, stat.S_ISUID),
    "g": lambda path: _has_bit(path, stat.S_ISGID),
    "k": lambda path: _has_bit(path, stat.S_ISVTX),
    "O": lambda path: path.exists() and path.stat().st_uid == os.geteuid(),
}
"""Letters of test(1), and what each looks at."""
