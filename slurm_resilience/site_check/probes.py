"""Look at one part of an installation on this machine; a judge decides what it means."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from slurm_resilience.config import Config
from slurm_resilience.errors import SresError, WireError
from slurm_resilience.model import Node
from slurm_resilience.resume.srun.srun_options import read_table
from slurm_resilience.site_check.judges import PluginSeen, PortSeen, ProgramSeen
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient
from slurm_resilience.wire import munge

CONNECT_SECONDS = 3.0
DEFAULT_SUPERVISOR = "/opt/slurm-resilience/bin/sres-resume"
"""The plugin's own (spank/common.c), where plugstack.conf names none."""
MOST_INCLUDES = 8
"""Levels of inclusion in plugstack.conf: a file that includes itself must end somewhere."""


class Site(Protocol):
    """The sources that the probes read: the configuration, Slurm and sresctld."""

    @property
    def config(self) -> Config: ...
    @property
    def client(self) -> SlurmClient: ...
    @property
    def info(self) -> ClusterInfo: ...
    def status(self) -> dict[str, Any]: ...


def controller_host(site: Site) -> str:
    """Return the name or address of sresctld's machine.

    Raises:
        WireError: neither sres.toml nor Slurm names one.
    """
    hosts = (*site.config.controller.hosts, *site.info.controllers)
    for host in filter(None, hosts):
        return host
    raise WireError("neither controller.host in sres.toml nor Slurm names a controller")


def resolve(host: str) -> list[str]:
    """Return the addresses of a host.

    Raises:
        WireError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise WireError(
            f"the name {host} does not resolve ({why}); add it to DNS or /etc/hosts, or "
            "set controller.host in sres.toml"
        ) from None
    return sorted({str(address[4][0]) for address in found})


def is_this_machine(host: str) -> bool:
    """Tell whether one of the host's addresses is this machine's own."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            try:
                trial.bind((address, 0))  # only an address of this machine's can be bound
            except OSError:
                continue
            return True
    return False


def connect(host: str, port: int) -> PortSeen:
    """Open a TCP connection and close it."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return PortSeen(host, port, refused=True)
    except OSError as error:
        return PortSeen(host, port, fault=error.strerror or str(error) or "no answer")
    return PortSeen(host, port)


def munge_round_trip(site: Site) -> bool:
    """Encode a credential and decode it again."""
    socket_path = site.config.wire.munge_socket
    if not socket_path:
        # Without munge Slurm does not answer either: then munge's own default is tried.
        with contextlib.suppress(SresError):
            socket_path = site.info.munge_socket
    payload = secrets.token_bytes(8)
    identity = munge.decode(munge.encode(payload, socket_path), socket_path)
    return identity.payload == payload and identity.uid == os.geteuid()


def program_fault(program: str) -> str:
    """Say why a program cannot be started; empty when it can."""
    if not program.strip():
        return "its name is empty"
    if "/" not in program:
        return "" if shutil.which(program) else f"{program} is not on PATH; write its whole path"
    if not Path(program).is_absolute():
        return f"{program} is not an absolute path"
    if not Path(program).is_file():
        return f"{program} {'is no file' if Path(program).exists() else 'does not exist'}"
    return "" if os.access(program, os.X_OK) else f"{program} is not executable (chmod +x)"


def replacement_program(site: Site) -> ProgramSeen:
    """Look for the replacement program, where this is sresctld's machine."""
    words, host = site.config.replace.program, controller_host(site)
    is_here = is_this_machine(host)
    fault = program_fault(words[0]) if words and is_here else ""
    return ProgramSeen(words, host, is_here, fault, site.config.replace.by)


def plugin(site: Site) -> PluginSeen:
    """Look for sres.so as Slurm does."""
    raw = site.info.raw
    directory = Path(raw.get("SLURM_CONF", "") or "/etc/slurm/slurm.conf").parent
    named = raw.get("PlugStackConfig", "")
    plugstack = Path(named) if named.startswith("/") else directory / "plugstack.conf"
    bin_path = site.config.slurm_bin or os.environ.get("PATH")
    srun = shutil.which("srun", path=bin_path)
    lines = [words for words in plugstack_lines(plugstack) if words[1].endswith("sres.so")]
    table = read_table(srun) if srun is not None else None
    listed = table is not None and table.listed("auto-resume")
    if not lines:
        return PluginSeen(str(plugstack), srun is not None, listed)
    path = plugin_path(lines[0][1], raw.get("PluginDir", ""))
    supervisor, unknown = plugin_arguments(lines[0][2:])
    return PluginSeen(
        str(plugstack),
        srun is not None,
        listed,
        str(path),
        path.exists(),
        supervisor,
        supervisor_fault(Path(supervisor)),
        unknown,
        len(lines),
        table.plugin_protocol if table is not None else 0,
    )


def plugin_arguments(words: Sequence[str]) -> tuple[str, str]:
    """Return the supervisor that a line of plugstack.conf names, and the first word that the plugin
    does not know (empty: it knows all)."""
    named = [word.partition("=")[2] for word in words if word.startswith("supervisor=")]
    unknown = [word for word in words if not word.startswith("supervisor=")]
    return (named or [DEFAULT_SUPERVISOR])[-1], (unknown or [""])[0]


def supervisor_fault(script: Path) -> str:
    """Say why not every user can start a Python script; empty when each can."""
    try:
        first = script.read_bytes().partition(b"\n")[0]
    except OSError as error:
        return error.strerror or str(error)
    words = first.removeprefix(b"#!").split() or [b""]
    interpreter = Path(os.fsdecode(words[0]))  # options may follow: #!/usr/bin/python3 -sP
    for file in (script, interpreter.resolve()):
        for path in (file, *file.parents):
            try:
                mode = path.stat().st_mode
            except OSError as error:
                return f"{path}: {error.strerror}"
            if not mode & stat.S_IXOTH:
                return f"other users may not execute or enter {path}"
    return ""


def plugstack_lines(file: Path, depth: int = 0) -> Iterator[list[str]]:
    """Yield the words of each plugin's line, those of included files too."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if len(words) > 1 and words[0] == "include" and depth < MOST_INCLUDES:
            pattern = words[1] if words[1].startswith("/") else str(file.parent / words[1])
            for included in sorted(Path("/").glob(pattern.lstrip("/"))):
                yield from plugstack_lines(included, depth + 1)
        elif len(words) > 1 and words[0] in ("optional", "required"):
            yield words


def plugin_path(named: str, plugin_dirs: str) -> Path:
    """Return the file that Slurm takes for a plugin: a bare name is looked up in PluginDir."""
    if named.startswith("/"):
        return Path(named)
    directories = [Path(word) for word in plugin_dirs.split(":") if word]
    found = [directory / named for directory in directories if (directory / named).exists()]
    return (found or [directories[0] / named if directories else Path(named)])[0]


def connected_agents(site: Site) -> tuple[tuple[Node, ...], dict[str, str]]:
    """Return Slurm's nodes, and what sresctld says of each node's sresd."""
    told = site.status().get("nodes", {})
    return site.client.nodes(), {name: str(seen.get("sresd", "")) for name, seen in told.items()}
