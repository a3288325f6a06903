"""The orders that the programs of a deep check are given, as JSON on their command line. Pure."""

from __future__ import annotations

import enum

import msgspec

from slurm_resilience.deepcheck.collective_math import Collective


class InstanceRequest(msgspec.Struct, frozen=True):
    """The checks of one node."""

    only: tuple[str, ...] = ()
    """Names of checks; empty: those that run by default."""
    gpus: int | None = None
    """GPUs that Slurm hands out on the node."""
    seconds: float = 60.0
    """The time for which each load runs."""
    profile: str = ""
    """A node type or a file; empty: the node's own checks.profile."""
    log: str = ""
    """The node's log; `%n` stands for the node's name."""
    scratch: str = ""
    """The directory that the disk check writes into."""


class RankGroup(msgspec.Struct, frozen=True):
    """Nodes whose ranks measure a collective together."""

    nodes: str
    """A hostlist; the first node's first rank keeps the store where the ranks meet."""
    address: str
    port: int


class RankHardware(enum.StrEnum):
    """The hardware whose links a collective goes over."""

    CPU = "cpu"
    """A rank on each node."""
    GPU = "gpu"
    """A rank on each GPU."""
    NEURON = "neuron"
    """A rank on each Neuron core."""


class CollectiveRequest(msgspec.Struct, frozen=True):
    """Sweeps of groups of nodes, all at the same time."""

    groups: tuple[RankGroup, ...]
    collectives: tuple[Collective, ...] = tuple(Collective)
    smallest_bytes: int = 8
    largest_bytes: int = 4 << 20
    factor: int = 8
    passes: int = 1
    """The sizes are measured so many times, each a row."""
    hardware: RankHardware = RankHardware.CPU
    budget_seconds: float = 60.0
    """A sweep ends early, after the size at which this time is over."""
    limit_seconds: float = 120.0
    """A rank waits for the others so long."""


class BurnRequest(msgspec.Struct, frozen=True):
    """A load of processors or GPUs whose results are known beforehand."""

    gpus: bool
    seconds: float
    memory_share: float
    """The share of the free memory that is written and read back."""


class NeuronRequest(msgspec.Struct, frozen=True):
    """A training on one Neuron core whose result is known beforehand."""

    seconds: float


SPEED_TOKEN = "SRES_SPEED_TOKEN"
"""The variable with what both partners of a link know, and no user of the nodes."""


class SpeedLink(msgspec.Struct, frozen=True):
    """Two nodes that measure the link between them."""

    server: str
    client: str
    address: str
    """The server's."""
    port: int


class SpeedRequest(msgspec.Struct, frozen=True):
    """Short measures of the nodes of a step."""

    gpus: bool
    rounds: tuple[tuple[SpeedLink, ...], ...]
    """Everything is measured so many times, each time with other pairs."""
