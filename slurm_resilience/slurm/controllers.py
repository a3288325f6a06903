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


def conf_of_one(text: str, host: ControllerHost, directory: Path) -> str:
    """Return a slurm.conf that knows one slurmctld alone.

    Args:
        text: the cluster's slurm.conf.
        host: the one that is kept.
        directory: of the cluster's slurm.conf, from where it includes other files.
    """
    lines = []
    for line in text.splitlines():
        if _CONTROLLER_LINE.match(line):
            continue
        if (match := _INCLUDE.match(line)) and not match[1].startswith("/"):
            line = f"Include {directory / match[1]}"
        lines.append(line)
    return "\n".join([f"SlurmctldHost={host.name}({host.address})", *lines]) + "\n"


def write_conf_of_one(source: Path, host: ControllerHost, target: Path) -> None:
    """Write a slurm.conf with which Slurm's commands ask one slurmctld alone.

    Args:
        source: the cluster's slurm.conf.
        host: the machine of that slurmctld.
        target: the file to write.

    Raises:
        SlurmUnreachable: slurm.conf cannot be read, or the new one not be written.
    """
    try:
        text = conf_of_one(source.read_text(), host, source.parent)
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
