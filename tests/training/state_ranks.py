"""Runs a function on several ranks, and makes the generation that they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from ranks import Ranks

from slurm_resilience.mesh.model import Member, Peer, PeerStatus, View
from slurm_resilience.training.options import Options
from slurm_resilience.training.rank_environment import read_environment
from slurm_resilience.training.recovery.healer import Healer


def view_of(statuses: list[PeerStatus], replica_size: int = 1, generation: int = 2) -> View:
    """A generation on nodes of their own, with the rank as seat."""
    members = tuple(
        Member(Peer(id=f"p{rank}", seat=rank, node=f"n{rank}"), status)
        for rank, status in enumerate(statuses)
    )
    return View(generation, members, replica_size, len(members))


class Life:
    """One process's worlds, one after another, without a mesh: its healer is told what the others'
    say of themselves."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.size = options.get("replica_size", 1)
        self.healer = Healer(Options(**options), read_environment({"SRES_MEET": "alone"}))
        self.view: View | None = None
        self.told: list[PeerStatus] = []
        """Its own words on itself, in the middle of healing."""

    def meet(self) -> None:
        """Leave the world, say how it is, and hear the others."""
        said: list[Any] = [None] * dist.get_world_size()
        self.healer.settle()
        dist.all_gather_object(said, self.healer.status("ready", self.view))
        number = (self.view.generation if self.view else 0) + 1
        self.view = view_of(said, self.size, number)

    def enter(self) -> None:
        """The block is about to begin."""
        assert self.view is not None
        self.healer.switch_on_again(self.view)

    def track(self, **objects: Any) -> str:
        """Heal; returns by what."""
        group: Any = SimpleNamespace(
            view=self.view, rank=self.rank, backend="gloo", more=lambda **_: nullcontext()
        )
        mesh: Any = SimpleNamespace(say=self.told.append)
        self.healer.heal(objects, group, mesh)
        return str(self.healer.last["kind"])

    def commit(self) -> None:
        """The end of an update."""
        self.healer.progress.step += 1
        if self.healer.tracked is not None:
            self.healer.tracked.mark()
        self.healer.committed()


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
