"""The order that `Lab.up` is given, checked before anything is touched."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience.errors import UsageError

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_GRES = re.compile(
    r"(?P<name>[a-z][a-z0-9_]*)(:(?P<type>[A-Za-z][A-Za-z0-9_.-]*))?:(?P<count>[1-9]\d{0,2})"
)
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*")
MAX_NODES = 512
# A Unix socket's path holds 107 characters; the longest below a lab is munge/munge.socket.2.
MAX_DIRECTORY = 80

_REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class LabSpec:
    """A lab to build.

    Attributes:
        nodes: how many nodes; they are called n1, n2, …
        gres: generic resources of each node, as Slurm writes them: ``gpu:2``, ``gpu:h100:2``.
        slurmdbd: run accounting too (MariaDB and slurmdbd).
        slurm_root: a directory with another Slurm's whole root file system (scripts/slurm-root
            makes one): controller, nodes and all commands run in it. This Python, munged and
            mariadbd stay the machine's.
        network: give each node its own network, address and cable; else they share the machine's.
        daemons: run sresctld and, on each node, sresd.
        backup: a second controller, ``ctl2``, with slurmctld's backup and a sresctld of its own.
        plugin: the SPANK plugin; ``"auto"`` takes ``spank/sres.so`` of the repository if built, and
            for a root directory called NAME ``spank/build/NAME/sres.so``.
        lifecycle: directory of scripts that a node runs before it joins; ``"auto"`` takes the
            repository's ``lifecycle/`` when there is one; None runs none.
        options: more lines of slurm.conf; they replace the lab's own. With a SuspendTime the lab
            has programs for Slurm's power saving too.
        partitions: further partitions, as slurm.conf writes them behind ``PartitionName=``.
        topology: topology.conf line by line: switches, or blocks (not on 22.05).
        sres_options: tables merged into the lab's sres.toml.
        cpus: processors per node (pretended, as the nodes share the machine's).
    """

    nodes: int
    gres: str | None = None
    slurmdbd: bool = False
    slurm_root: str | Path | None = None
    network: bool = False
    daemons: bool = True
    backup: bool = False
    plugin: str | Path | None = "auto"
    lifecycle: str | Path | None = "auto"
    options: dict[str, str] = field(default_factory=dict)
    partitions: tuple[str, ...] = ()
    topology: tuple[str, ...] = ()
    sres_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    cpus: int = 4

    def check(self) -> None:
        """Raise UsageError for anything that cannot be built."""
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"a lab has 1 to {MAX_NODES} nodes, not {self.nodes}")
        if self.backup and not self.network:
            raise UsageError(
                "a backup controller needs an address of its own: a lab with a network"
            )
        if not 1 <= self.cpus <= 1024:
            raise UsageError(f"a node has 1 to 1024 processors, not {self.cpus}")
        if self.gres is not None and not _GRES.fullmatch(self.gres):
            raise UsageError(f"'{self.gres}' is not a GRES; write e.g. gpu:2 or gpu:h100:2")
        for key, value in self.options.items():
            if not _OPTION.fullmatch(key) or not value or "\n" in value:
                raise UsageError(f"'{key}={value}' is not a slurm.conf line; write KEY=VALUE")
        if any("\n" in partition or not partition for partition in self.partitions):
            raise UsageError("a partition of a lab is one line of slurm.conf")
        if (root := self.root_directory()) is not None and not (root / "usr").is_dir():
            raise UsageError(f"{root}: not a root directory; make one with debootstrap")
        plugin, scripts = self.plugin_file(), self.lifecycle_directory()
        if plugin is not None and not plugin.is_file():
            raise UsageError(f"{plugin}: no such plugin; build it with `make -C spank`")
        if scripts is not None and not scripts.is_dir():
            raise UsageError(f"{scripts}: no such directory of lifecycle scripts")

    @property
    def names(self) -> tuple[str, ...]:
        """The node names, in order."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def gres_parts(self) -> tuple[str, str | None, int] | None:
        """(name, type, count) of the GRES; None without one."""
        match = _GRES.fullmatch(self.gres or "")
        return (match["name"], match["type"], int(match["count"])) if match else None

    def root_directory(self) -> Path | None:
        """Return the other Slurm's root, if any."""
        return Path(self.slurm_root).resolve() if self.slurm_root else None

    def plugin_file(self) -> Path | None:
        """Return the SPANK plugin to load, if any."""
        if self.plugin != "auto":
            return Path(self.plugin).resolve() if self.plugin else None
        built = _REPOSITORY / "spank"
        if (root := self.root_directory()) is not None:
            # A plugin does not load into another Slurm than the one that it was built for.
            built = built / "build" / root.name
        return built / "sres.so" if (built / "sres.so").is_file() else None

    def lifecycle_directory(self) -> Path | None:
        """Return the directory of lifecycle scripts, if any."""
        if self.lifecycle != "auto":
            return Path(self.lifecycle).resolve() if self.lifecycle else None
        example = _REPOSITORY / "lifecycle"
        return example if example.is_dir() else None

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> LabSpec:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))
