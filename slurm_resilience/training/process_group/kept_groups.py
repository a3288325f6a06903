"""Refuse to keep, from one world to the next, what belongs to one: it ended the training at the
first fault, hours later."""

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


def refuse(built: Any, build: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuse what holds a process group.

    Args:
        built: what `Session.once` is about to keep.
        build: the function that made it.
        args: its arguments: a number may be that of the world, for which alone it is kept then.

    Raises:
        UsageError: it holds one.
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


def _parts(built: Any) -> Iterator[Any]:
    values = built.values() if isinstance(built, dict) else built
    for one in values if isinstance(built, list | tuple | dict) else (built,):
        if isinstance(one, nn.Module):
            yield from one.modules()
        else:
            yield one
