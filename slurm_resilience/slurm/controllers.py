"""slurmctld's machines: their names, the one in control, and commands for one of them alone.

Where Slurm has a backup, `scontrol ping` does not tell which slurmctld is in control: it prints UP
for a standby too. Two things do. A slurmctld in standby refuses every request, so a command that
knows no other slurmctld fails; and the one in control writes its number and the time into
``heartbeat`` in StateSaveLocation every few seconds, by which Slurm itself decides whether its
backup may take over.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.slurm.client import ClusterInfo

_BEAT = struct.Struct(">QQ")
_BEAT_FILES = ("heartbeat", "heartbeat.old", "heartbeat")
"""slurmctld writes a new file, and has moved the last one away for a moment."""
_HOST = re.compile(r"SlurmctldHost(?:\[(\d+)\])?")
_CONTROLLER_LINE = re.compile(
    r"\s*(SlurmctldHost|ControlMachine|ControlAddr|BackupController|BackupAddr)\s*=", re.IGNORECASE
)
_HOST_LINE = re.compile(
    r"^[ \t]*SlurmctldHost[ \t]*=[ \t]*([^\s(#]+)", re.IGNORECASE | re.MULTILINE
)
_INCLUDE = re.compile(r"\s*include\s+(\S+)", re.IGNORECASE)
_HOST_OR_INCLUDE = re.compile(
    rf"^(?:{_CONTROLLER_LINE.pattern}|{_INCLUDE.pattern})", re.IGNORECASE | re.MULTILINE
)
MAX_INCLUDED = 8
"""Files one within the other."""


REFUSED_IN_STANDBY = "in standby mode"
"""A slurmctld that is not in control says so to every request."""


class ControllerHost(NamedTuple):
    """A machine of slurmctld's, by its place in slurm.conf."""

    number: int
    name: str
    address: str


class ControlBeat(NamedTuple):
    """The last sign that the slurmctld in control has left in StateSaveLocation."""

    number: int
    """Its machine's place in slurm.conf."""
    at: float
    """Seconds since the epoch, by that machine's clock."""


def controller_hosts(info: ClusterInfo) -> tuple[ControllerHost, ...]:
    """Return the machines of slurmctld, the primary first."""
    found = []
    for key, value in info.raw.items():
        if match := _HOST.fullmatch(key):
            name, _, address = value.partition("(")
            found.append(ControllerHost(int(match[1] or 0), name, address.rstrip(")") or name))
    return tuple(sorted(found))


def own_host(hosts: tuple[ControllerHost, ...], name: str = "") -> ControllerHost | None:
    """Return this machine among those of slurmctld, by its name, as Slurm tells it; None: it is
    none of them.

    Args:
        hosts: of the cluster.
        name: this machine's; empty: it is asked for.
    """
    own = (name or socket.gethostname()).partition(".")[0]
    return next((host for host in hosts if host.name.partition(".")[0] == own), None)


def renumbered(host: ControllerHost, conf: Path) -> ControllerHost:
    """Return a machine with its present place in slurm.conf: a person may change their order, and
    slurmctld's beats have the new number after its next start.

    Args:
        host: the machine, as it was known.
        conf: slurm.conf.
    """
    try:
        names = [name.partition(".")[0] for name in _HOST_LINE.findall(conf.read_text())]
        return host._replace(number=names.index(host.name.partition(".")[0]))
    except (OSError, ValueError):
        return host  # it may stand in a file that slurm.conf includes


def conf_of_one(
    text: str, host: ControllerHost, directory: Path, read: Callable[[Path], str]
) -> str:
    """Return a slurm.conf that knows one slurmctld alone.

    Args:
        text: the cluster's slurm.conf.
        host: the one that is kept.
        directory: of the cluster's slurm.conf, from where it includes other files.
        read: returns the text of an included file.

    Raises:
        SlurmUnreachable: files include each other without end.
    """
    lines = _of_no_host(text, directory, read, MAX_INCLUDED)
    return "\n".join([f"SlurmctldHost={host.name}({host.address})", *lines]) + "\n"


def _of_no_host(text: str, directory: Path, read: Callable[[Path], str], depth: int) -> list[str]:
    """Return the lines of a file that name no slurmctld, with those of the files that it includes
    where one of them names a slurmctld or includes others: Slurm would look for these elsewhere."""
    if not depth:
        raise SlurmUnreachable("slurm.conf includes files that include each other")
    lines = []
    for line in text.splitlines():
        if _CONTROLLER_LINE.match(line):
            continue
        match = _INCLUDE.match(line)
        if match is None:
            lines.append(line)
            continue
        file = directory / match[1]
        inner = read(file)
        if _HOST_OR_INCLUDE.search(inner):
            lines += _of_no_host(inner, directory, read, depth - 1)
        else:
            lines.append(f"Include {file}")  # so that Slurm sees what changes in it
    return lines


def write_conf_of_one(source: Path, cluster: str, host: ControllerHost, target: Path) -> None:
    """Write a slurm.conf with which Slurm's commands ask one slurmctld alone.

    Args:
        source: the cluster's slurm.conf.
        cluster: its name, which stands for `%c` in names of included files.
        host: the machine of that slurmctld.
        target: the file to write.

    Raises:
        SlurmUnreachable: slurm.conf or a file that it includes cannot be read, or the new one not
            be written.
    """

    def read(file: Path) -> str:
        return Path(str(file).replace("%c", cluster)).read_text()

    try:
        text = conf_of_one(source.read_text(), host, source.parent, read)
        fresh = target.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(target)
    except OSError as error:
        raise SlurmUnreachable(f"slurm.conf for {host.name} alone: {error}") from None


def read_beat(state_save: Path) -> ControlBeat:
    """Return the last beat of the slurmctld in control.

    Raises:
        SlurmUnreachable: there is none to be read.
    """
    data, failure = b"", ""
    for name in _BEAT_FILES:
        try:
            data = (state_save / name).read_bytes()
            break
        except OSError as error:
            failure = failure or f"{state_save / name}: {error.strerror}"
    else:
        raise SlurmUnreachable(f"it cannot be told which slurmctld is in control: {failure}")
    if len(data) < _BEAT.size:
        raise SlurmUnreachable(f"{state_save / 'heartbeat'} has {len(data)} bytes: it is not read")
    at, number = _BEAT.unpack_from(data)
    return ControlBeat(number, float(at))
