"""Runs a function on several ranks, and makes the generation that they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import Ranks

from slurm_resilience.mesh.model import Member, Peer, Status, View


def view_of(statuses: list[Status], replica_size: int = 1, generation: int = 2) -> View:
    """A generation on nodes of their own, with the rank as seat."""
    members = tuple(
        Member(Peer(id=f"p{rank}", seat=rank, node=f"n{rank}"), status)
        for rank, status in enumerate(statuses)
    )
    return View(generation, members, replica_size, len(members))


def run(body: Callable[..., Any], world: int, path: Path, *args: Any) -> list[Any]:
    """Call ``body(rank, group, *args)`` on every rank; returns what each returned.

    A rank that dies gives its exit code. An exception in a rank fails the caller, with the rank's
    trace, unless another rank died (then the trace is its answer).
    """
    with Ranks(path, world, _in_the_world, body, *args) as ranks:
        found = [ranks.answer(rank) for rank in range(world)]
    died = any(kind == "died" for kind, _ in found)
    for rank, (kind, answer) in enumerate(found):
        assert kind != "raised" or died, f"rank {rank}:\n{answer}"
    return [answer for _, answer in found]


def _in_the_world(rank: int, _: Any, body: Callable[..., Any], *args: Any) -> Any:
    return body(rank, dist.group.WORLD, *args)
