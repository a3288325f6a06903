"""slurm.conf on this machine, for a time in which no slurmctld tells what it says."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.slurm import parse
from slurm_resilience.slurm.client import ClusterInfo

PLACES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""The places in which Slurm's commands look for it; the second one is of a machine that has no file
of its own."""
_NAMES = {name.lower(): name for name in ("ClusterName", "SlurmctldPort", "AuthInfo")}


def settings_of_file() -> ClusterInfo:
    """Return the settings that sresctld is found and trusted by, without asking slurmctld.

    Raises:
        SlurmUnreachable: there is no such file, or it does not say them (one that it includes may).
    """
    places = [os.environ["SLURM_CONF"]] if os.environ.get("SLURM_CONF") else PLACES
    for place in places:
        try:
            text = Path(place).read_text()
        except (OSError, UnicodeDecodeError):
            continue
        return settings_of(text)
    raise SlurmUnreachable(f"slurm.conf cannot be read ({', '.join(places)})")


def settings_of(text: str) -> ClusterInfo:
    """Return the same from the text of a slurm.conf.

    Raises:
        SlurmUnreachable: it does not say them.
    """
    hosts: list[str] = []
    lines: list[str] = []
    for line in text.splitlines():
        key, _, value = line.partition("#")[0].partition("=")
        name, value = key.strip().lower(), value.strip()
        if name == "slurmctldhost":
            hosts.append(f"SlurmctldHost[{len(hosts)}]={value}")
        elif name == "slurmuser":
            lines.append(f"SlurmUser={value}({_uid_of(value)})")
        elif name in _NAMES:
            lines.append(f"{_NAMES[name]}={value}")
    if not hosts or not any(line.startswith("ClusterName=") for line in lines):
        raise SlurmUnreachable("slurm.conf on this machine names no SlurmctldHost or no cluster")
    return parse.config("\n".join(hosts + lines))


def _uid_of(user: str) -> int:
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise SlurmUnreachable(f"this machine knows no user {user} (SlurmUser)") from None
