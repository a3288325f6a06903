"""Prepare a process, once, before the others know that it is there."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, MutableMapping

import torch
import torch.distributed as dist

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.training import compat
from slurm_resilience.training.options import Options
from slurm_resilience.training.process_group.device_meshes import DEVICE_MESHES
from slurm_resilience.training.rank_environment import RankEnvironment

log = logging.getLogger("sres.training")

LAZY = "TORCH_GLOO_LAZY_INIT"
"""torch: connect two ranks when they first talk. Such a connection is not known to be the group's,
and cannot be cut when a peer dies."""

WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""torch: its watchdog of NCCL ends no process, neither for a collective that failed or takes long
nor for a GPU that faulted. The mesh finds both, and says which process is to be replaced."""


def own_group() -> str:
    """Return why a program must not begin with a process group of its own; empty: it has none.

    The first fault would end it, and a process that is replaced would wait in it for the others.
    """
    if not dist.is_initialized():
        return ""
    return (
        "a process group is there already: leave out init_process_group, a resilient function "
        "makes its own in each world"
    )


def rules(options: Options, where: RankEnvironment) -> WorldRules:
    """When a world may be formed.

    Raises:
        UsageError: no world could ever be.
    """
    found = WorldRules(
        seats=where.seats,
        min_world=options.min_world or where.min_world or where.seats,
        replica_size=options.replica_size,
        patience=options.patience,
        start_patience=options.start_patience,
        core=where.core,
        sizes=where.sizes,
    )
    if not options.replica_size <= found.min_world <= where.seats:
        raise UsageError(
            f"min_world={found.min_world} must lie between replica_size="
            f"{options.replica_size} and the {where.seats} ranks of the full world"
        )
    return found


def connect_at_once(environment: MutableMapping[str, str]) -> None:
    """Have a group connect all its ranks when it is formed, and say so to who wants it otherwise.

    Args:
        environment: this process's.
    """
    if environment.pop(LAZY, "0").lower() not in ("", "0", "n", "no", "f", "false"):
        log.warning("%s is not used: a recovery could not cut such connections", LAZY)


def take_gpu(environment: Mapping[str, str]) -> None:
    """Make the GPU of this process's place on its node the current one, where the program has
    chosen none: by default that is the first, for all of them."""
    local = environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or "0"
    if not local.isdecimal() or int(local) == 0:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if int(local) < torch.cuda.device_count():
        torch.cuda.set_device(int(local))


def warm_up(options: Options) -> None:
    """Import what takes long."""
    connect_at_once(os.environ)
    if options.uses_cuda:
        os.environ.update(WATCHDOG)
        take_gpu(os.environ)
    compat.load_compiler()
    names = ["torch.nn.parallel", "torch.distributed.device_mesh"]
    if options.replica_size > 1:
        names += ["torch.distributed.tensor", "torch.distributed.fsdp"]
    for name in names:
        importlib.import_module(name)
    importlib.import_module("slurm_resilience.training.data")
    # What it imports the first time would hold up all ranks when the first world is formed.
    compat.forget_layouts()
    DEVICE_MESHES.watch()
