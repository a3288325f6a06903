"""Check that what is tracked can be healed: every parameter has its shape, and shards of tensors
are the parts by which ranks are healed. The plan takes two ranks of equal ``rank % replica_size``
for holders of the same part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resilience.errors import UsageError
from slurm_resilience.training.state import adapters


def check(objects: dict[str, Any], replica_size: int) -> None:
    """Look at every parameter. Every rank finds the same, without asking another.

    Args:
        objects: name → what is tracked.
        replica_size: ranks that hold one copy of the model together.

    Raises:
        UsageError: a tensor is cut up in another way, or has no shape yet.
    """
    if lazy := [path for path, one in _parameters(objects) if nn.parameter.is_lazy(one)]:
        more = f" and {len(lazy) - 3} more" if len(lazy) > 3 else ""
        raise UsageError(
            f"{', '.join(lazy[:3])}{more}: a lazy module has no weights before its first forward, "
            "and none that could be healed: call it with a batch where it is built, before s.track"
        )
    seen = set()
    for name, tensor in _sharded(objects):
        layout = (tensor.device_mesh, tensor.placements)
        if layout not in seen:
            seen.add(layout)
            cut = [n for n, one in enumerate(tensor.placements) if not one.is_replicate()]
            if trouble := _trouble(name, tensor.device_mesh.mesh, cut, replica_size):
                raise UsageError(trouble)


def _parameters(objects: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, thing in objects.items():
        one = adapters.unwrap(thing)
        pairs = one.named_parameters() if isinstance(one, nn.Module) else (("", one),)
        for path, tensor in pairs:
            yield f"{name}.{path}".rstrip("."), tensor


def _sharded(objects: dict[str, Any]) -> Iterator[tuple[str, DTensor]]:
    for path, tensor in _parameters(objects):
        if isinstance(tensor, DTensor):
            yield path, tensor


def _trouble(name: str, mesh: torch.Tensor, cut: list[int], replica_size: int) -> str:
    """Say what is wrong with a tensor; empty: nothing.

    Args:
        name: its name.
        mesh: the ranks of its mesh.
        cut: dimensions of the mesh over which it is cut up.
        replica_size: as in `check`.
    """
    shards = math.prod(mesh.shape[n] for n in cut)
    if replica_size % shards:
        return (
            f"{name} is sharded over {shards} ranks, replica_size is {replica_size}: "
            f"resilient(replica_size={shards}), or fully_shard(…, mesh=s.mesh())"
        )
    places = itertools.product(*(range(size) for size in mesh.shape))
    holders: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, place in zip(mesh.flatten().tolist(), places, strict=True):
        shard = tuple(place[n] for n in cut)
        first, held = holders.setdefault(rank % replica_size, (rank, shard))
        if held != shard:
            return (
                f"{name}: ranks {first} and {rank} hold different shards, with replica_size="
                f"{replica_size} they must hold the same: fully_shard(…, mesh=s.mesh())"
            )
    return ""
