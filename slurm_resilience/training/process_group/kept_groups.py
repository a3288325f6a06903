"""Refuse to keep, from one world to the next, what belongs to one, or what only all ranks can build
together: it ended the training at the first fault, hours later, or a replaced rank waited alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slurm_resilience.errors import UsageError

SHARD = "fully_shard(model, mesh=s.mesh()), and its optimizer"
_INSTEAD: tuple[tuple[type, str], ...] = (
    (nn.parallel.DistributedDataParallel, "net = s.ddp(model)"),
    (dist.ProcessGroup, "s.new_group(…)"),
    (DeviceMesh, "s.mesh()"),
)


def refuse(built: Any, build: Callable[..., Any], args: Sequence[Any], collectives: int) -> None:
    """Refuse what holds a process group, or has made collectives.

    Args:
        built: what `Session.once` is about to keep.
        build: the function that made it.
        args: its arguments: a number may be that of the world, for which alone it is kept then.
        collectives: those that it has begun.

    Raises:
        UsageError: it holds one, or has begun some.
    """
    if isinstance(build, functools.partial) or any(isinstance(one, int) for one in args):
        return
    kinds = _INSTEAD
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        kinds += ((fsdp.FSDPModule, SHARD), (fsdp.FullyShardedDataParallel, SHARD))
    for part in _parts(built):
        for kind, instead in kinds:
            if isinstance(part, kind):
                raise UsageError(
                    f"s.once keeps a {kind.__name__}, which is of no use after a fault: it belongs "
                    f"to this world. Make it whenever the function is entered: {instead}"
                )
    if collectives:
        name = getattr(build, "__qualname__", build)
        raise UsageError(
            f"s.once({name}) makes collectives (a barrier, a broadcast): a replaced rank, which "
            "alone builds, would wait there for the others. Make them in the training function, "
            "before s.once"
        )


def _parts(built: Any) -> Iterator[Any]:
    values = built.values() if isinstance(built, dict) else built
    for one in values if isinstance(built, list | tuple | dict) else (built,):
        if isinstance(one, nn.Module):
            yield from one.modules()
        else:
            yield one
