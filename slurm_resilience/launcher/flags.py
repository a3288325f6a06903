"""Read the words of the command line. Pure.

Flags that torchrun has keep its meaning; what is different here is said where it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from slurm_resilience.errors import UsageError

DEFAULT_PORT = 29400
"""The port of the mesh on each node, for `--rdzv-backend peers`."""

STDOUT, STDERR = 1, 2
"""Bits of torchrun's --redirects and --tee."""


class SeatSpan(msgspec.Struct, frozen=True):
    """The number of nodes that a training may have."""

    least: int
    most: int


def nnodes(text: str) -> SeatSpan:
    """``4`` or ``2:4``.

    Raises:
        UsageError: it is neither.
    """
    found = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text.strip())
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes={text}: write a number (4) or a range (2:4), from 1 on")
    return SeatSpan(least, most)


def local_world(text: str, gpus: int, cpus: int) -> int:
    """Count the ranks of this node.

    Args:
        text: a number, ``gpu``, ``cpu`` or ``auto`` (GPUs if there are any, else processors).
        gpus: how many this node offers; -1: unknown.
        cpus: how many processors this process may use.

    Raises:
        UsageError: another word, or no GPU.
    """
    if text == "gpu" or (text == "auto" and gpus > 0):
        if gpus < 1:
            raise UsageError(
                "--nproc-per-node=gpu: no GPU found (CUDA_VISIBLE_DEVICES, SLURM_GPUS_ON_NODE, "
                "NVML); give a number"
            )
        return gpus
    if text in ("cpu", "auto"):
        return cpus
    if re.fullmatch(r"[1-9][0-9]{0,4}", text):
        return int(text)
    raise UsageError(f"--nproc-per-node={text}: write a number from 1 on, gpu, cpu or auto")


def streams(option: str, text: str, ranks: int) -> tuple[int, ...]:
    """torchrun's ``3`` (all ranks) or ``0:1,1:3`` for --redirects and --tee.

    Args:
        option: for the message.
        text: 0 none, 1 stdout, 2 stderr, 3 both; alone, or for single local ranks.
        ranks: of this node.

    Returns:
        One value for each local rank.

    Raises:
        UsageError: not of that form.
    """
    text = text.removeprefix("=")  # of -r=3, as torchrun's own parser does
    if re.fullmatch("[0-3]", text):
        return (int(text),) * ranks
    if not re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise UsageError(f"{option}={text}: write 0 to 3, or local ranks with one each: 0:1,1:3")
    each = {int(rank): int(bits) for rank, bits in (part.split(":") for part in text.split(","))}
    if max(each) >= ranks:
        raise UsageError(f"{option}={text}: there is no local rank {max(each)} (0 to {ranks - 1})")
    return tuple(each.get(rank, 0) for rank in range(ranks))


def ranks_filter(text: str | None, ranks: int) -> frozenset[int]:
    """Local ranks whose output is shown.

    Raises:
        UsageError: not a list of local ranks.
    """
    if not text:
        return frozenset(range(ranks))
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise UsageError(f"--local-ranks-filter={text}: write local ranks, as in 0,1")
    return frozenset(int(rank) for rank in text.split(","))


class MasterAddress(msgspec.Struct, frozen=True):
    """The start of a node's mesh: seat i of the node listens on port + i."""

    host: str
    port: int

    def seat(self, local: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port + local}"


def addresses(text: str) -> tuple[MasterAddress, ...]:
    """``n1,n2:29500,[fd00::3]:29400``: one for each node, in node rank order.

    Raises:
        UsageError: an entry is not HOST or HOST:PORT.
    """
    result = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+))(?::([0-9]{1,5}))?", part)
        if not found or int(found[3] or DEFAULT_PORT) not in range(1, 65536):
            raise UsageError(
                f"--rdzv-endpoint={text}: '{part}' is not HOST or HOST:PORT; write one for each "
                f"node, as in n1,n2 or n1:29400,n2:29400"
            )
        result.append(MasterAddress(found[1] or found[2], int(found[3] or DEFAULT_PORT)))
    return tuple(result)


def secret(text: str, origin: str) -> str:
    """Read a training's secret.

    Raises:
        UsageError: it is not hex, or too short.
    """
    text = text.strip()
    if not re.fullmatch(r"([0-9A-Fa-f]{2}){16,}", text):
        raise UsageError(
            f"{origin}: the secret is at least 16 bytes in hex; make one with: openssl rand -hex 32"
        )
    return text.lower()


def gpus_offered(environment: Mapping[str, str]) -> int:
    """GPUs by what Slurm and CUDA say in the environment; -1: they say nothing."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA stops at the first one that it does not know.
        return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    return int(on_node) if on_node.isdigit() else -1


def number(environment: Mapping[str, str], name: str) -> int:
    """Read a count from the environment; 0 when it is not there.

    Raises:
        UsageError: it is no number.
    """
    text = environment.get(name, "")
    if text and not text.isdecimal():
        raise UsageError(f"${name}={text}: not a number")
    return int(text or 0)


def first_failure(ends: Sequence[int]) -> int:
    """Return the exit code of a node whose processes ended like this, in this order."""
    return next((code for code in ends if code), 0)
