"""Read from the environment, once, which rank this process is. Asks the machine for its name."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.model import SPEAKERS_ABOVE, Peer
from slurm_resilience.mesh.own_address import own_address
from slurm_resilience.mesh.rank_variables import ELASTIC_NODES, LENT, NAMED_SIZES, RANK_STEP
from slurm_resilience.mesh.rendezvous import shared_home

ALONE = "alone"
"""The place to meet of a rank that has no others: no program can take its seat there."""
PARTS = ("recovery", "state", "data", "rootless")


class ElasticRanks(NamedTuple):
    """Ranks of an elastic job; all 0: it is none."""

    least: int = 0
    core: int = 0
    most: int = 0
    sizes: tuple[int, ...] = ()
    """Those that a world may have; empty: any."""


class RankEnvironment(NamedTuple):
    """The environment of a training process, as docs/training.md lists it."""

    seat: int
    seats: int
    incarnation: int
    node: str
    domain: str
    meet: str
    secret: str
    address: str
    """The address that the mesh listens on."""
    parts: frozenset[str]
    """Those of the four parts that are on."""
    min_world: int = 0
    """As the launcher was told (--nnodes MIN:MAX); 0: nothing."""
    step: str = ""
    """The step's number, where the place to meet is that step's own by default; empty: else."""
    speakers: bool = False
    """One rank of each node is connected to other nodes, instead of all."""
    core: int = 0
    """Ranks of an elastic job's own nodes, which are there from the start; 0: all are."""
    lent: bool = False
    """SIGTERM asks this process to leave: its node belongs to a companion of an elastic job."""
    sizes: tuple[int, ...] = ()
    """Ranks that a world of an elastic job may have; empty: any number."""


def read_environment(environment: Mapping[str, str]) -> RankEnvironment:
    """Read this process's seat, and the place to meet, from its environment.

    Raises:
        UsageError: a number is none, a part is unknown, nothing says where to meet, its srun has
            ended, or it is what a rank was told that started this process in a step of its own.
    """
    shared_home(environment)  # is there; a launcher names a place in it
    seat = _seat(environment)
    elastic = elastic_ranks(environment)
    seats = elastic.most or _number(environment, ("SRES_SEATS", "WORLD_SIZE", "SLURM_NTASKS"), 1)
    # A rank that stands in for one on a sick node has a seat behind the last.
    if not 0 <= seat < seats and environment.get(LENT) != "1":
        raise UsageError(f"seat {seat} of {seats}: SRES_SEAT (or RANK) must be below SRES_SEATS")
    node = environment.get("SRES_NODE") or environment.get("SLURMD_NODENAME")
    meet = _meet(environment, seats)
    _refuse_inherited(environment, meet)
    return RankEnvironment(
        seat,
        seats,
        _number(environment, ("SRES_INCARNATION",), 0),
        node or socket.gethostname(),
        _domain(environment),
        meet,
        environment.get("SRES_SECRET", ""),
        address(environment, seats),
        _parts(environment),
        _number(environment, ("SRES_MIN_WORLD",), elastic.least),
        "" if environment.get("SRES_MEET") else environment.get("SLURM_STEP_ID", ""),
        _has_speakers(environment, seats),
        elastic.core,
        environment.get(LENT) == "1",
        elastic.sizes,
    )


def note_step(environment: MutableMapping[str, str], meet: str) -> None:
    """Note the step of this rank for what it starts.

    Args:
        environment: of this process.
        meet: the place where the rank meets the others.
    """
    step = _job_and_step(environment)
    if step and meet != ALONE:
        environment[RANK_STEP] = f"{step} {meet}"


def _refuse_inherited(environment: Mapping[str, str], meet: str) -> None:
    """Refuse to take the seat of the rank that started this process by srun."""
    step, _, place = environment.get(RANK_STEP, "").partition(" ")
    own = _job_and_step(environment)
    if not own or place != meet or step == own or meet == ALONE:
        return
    if step.partition(".")[0] == own.partition(".")[0]:
        raise UsageError(
            f"step {own} was started by an srun within a rank of step {step}, and would take a "
            "seat of that rank's training: start it by srun --auto-resume=1, which begins a "
            "training of its own, or give it a place of its own to meet (SRES_MEET) and seats "
            "(SRES_SEAT, SRES_SEATS)"
        )


def _job_and_step(environment: Mapping[str, str]) -> str:
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else ""


def elastic_ranks(environment: Mapping[str, str]) -> ElasticRanks:
    """Read between which sizes the job grows and shrinks.

    Raises:
        UsageError: a number is none, or a node's ranks cannot be known.
    """
    text = environment.get(ELASTIC_NODES, "")
    if not text:
        return ElasticRanks()
    least, _, most = text.partition(":")
    core = environment.get("NNODES", "")
    if not (least.isdecimal() and most.isdecimal() and core.isdecimal() and int(core)):
        raise UsageError(f"{ELASTIC_NODES}={text!r} with NNODES={core!r}: write MIN:MAX and N")
    here = _number(environment, ("LOCAL_WORLD_SIZE",), 0)
    if not here and environment.get("SRES_SEATS_HERE"):
        # The tasks of a step that joined may be fewer than a node's: those of the lost seats.
        here = _number(environment, ("SRES_SEATS",), 0) // max(1, int(most))
    # Without a launcher the tasks are the ranks, the same number on each node.
    here = here or _number(environment, ("SLURM_NTASKS",), 1) // max(
        1, _number(environment, ("SLURM_NNODES",), 1)
    )
    named = environment.get(NAMED_SIZES, "")
    sizes = named.split(",") if named else []
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(f"{NAMED_SIZES}={named!r}: write numbers of nodes, such as 2,4,8")
    allowed = tuple(sorted(int(size) * here for size in sizes))
    return ElasticRanks(int(least) * here, int(core) * here, int(most) * here, allowed)


def this_peer(where: RankEnvironment) -> Peer:
    """Return this process, as the others know it."""
    return Peer(
        id=f"{where.seat:05d}.{where.incarnation}.{uuid.uuid4().hex[:12]}",
        seat=where.seat,
        incarnation=where.incarnation,
        node=where.node,
        domain=where.domain,
        host=where.address,
        pid=os.getpid(),
        seats=where.seats,
    )


def address(environment: Mapping[str, str], seats: int) -> str:
    """Return the address that others can reach: SRES_ADDRESS; loopback where all ranks are on one
    machine; else the one of the route to MASTER_ADDR, or the host name's."""
    local = _number(environment, ("LOCAL_WORLD_SIZE",), 0)
    return own_address(environment, local == seats or seats == 1)


def _seat(environment: Mapping[str, str]) -> int:
    here = environment.get("SRES_SEATS_HERE", "")
    if here:
        # A step that joined in the place of a lost node: its tasks take the lost seats.
        local = _number(environment, ("SLURM_LOCALID", "LOCAL_RANK"), 0)
        words = here.split(",")
        if local < len(words) and words[local].isdecimal():
            return int(words[local])
        raise UsageError(f"SRES_SEATS_HERE={here!r} has no seat for local rank {local}")
    return _number(environment, ("SRES_SEAT", "RANK", "SLURM_PROCID"), 0)


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = environment.get(name, "")
        if text:
            if not text.isdecimal():
                raise UsageError(f"{name}={text!r} is no number")
            return int(text)
    return default


def _has_speakers(environment: Mapping[str, str], seats: int) -> bool:
    shape = environment.get("SRES_MESH") or "auto"
    if shape not in ("auto", "full", "speakers"):
        raise UsageError(f"SRES_MESH={shape!r}: write auto, full or speakers")
    # All ranks must come to the same: they are told the same number of seats.
    return seats > SPEAKERS_ABOVE if shape == "auto" else shape == "speakers"


def _domain(environment: Mapping[str, str]) -> str:
    given = environment.get("SRES_DOMAIN")
    if given:
        return given
    # Slurm's topology plugin: switches from the top to the node, e.g. "s0.s2.n17".
    return environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def _meet(environment: Mapping[str, str], seats: int) -> str:
    given = environment.get("SRES_MEET", "")
    if given:
        return given
    shared = environment.get("SRES_DIR", "")
    if shared:
        return f"dir:{shared}/mesh"
    job = environment.get("SLURM_JOB_ID", "")
    if job and seats > 1:
        # A requeued job must not find how its earlier life ended.
        life = environment.get("SLURM_RESTART_COUNT", "0")
        step = environment.get("SLURM_STEP_ID", "0")
        return f"dir:{Path.cwd()}/.sres/mesh-{job}.{life}.{step}"
    if seats == 1:
        return ALONE
    raise UsageError(
        "nothing says where the ranks meet: start them with "
        "`python -m slurm_resilience.launcher`, or set SRES_MEET=dir:PATH"
    )


def _parts(environment: Mapping[str, str]) -> frozenset[str]:
    text = environment.get("SRES_PARTS", ",".join(PARTS))
    parts = frozenset(word.strip() for word in text.split(",") if word.strip())
    unknown = sorted(parts - set(PARTS))
    if unknown:
        raise UsageError(f"SRES_PARTS: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return parts
