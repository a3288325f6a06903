"""Ranks of one world as threads of one process, without sockets: collectives are copies.

One thread runs at a time, up to its next collective: what ranks share that processes would not (the
random state) is not mixed up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurm_resilience.training.elastic import gradient_sums, same_numerics, tree_exchange

ROOMS = (gradient_sums, same_numerics, tree_exchange)
DEADLINE_SECONDS = 240


class RankThreads:
    """A world; collectives of all ranks meet here."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.calls: list[list[str]] = [[] for _ in range(world)]
        """Names of the collectives of each rank."""
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(world)
        self._given: list[Any] = [None] * world
        self._own = threading.local()
        self._errors: list[BaseException] = []

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Call ``body(rank)`` on all ranks; return what each returned."""
        found: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            self._own.rank = rank
            with self._turn:
                try:
                    found[rank] = body(rank)
                except BaseException as error:
                    self._errors.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        if self._errors:
            raise self._errors[0]
        return found

    def _exchange(self, name: str, value: Any) -> list[Any]:
        """Give all ranks the values of all."""
        rank = self._own.rank
        self.calls[rank].append(name)
        self._given[rank] = value
        self._turn.release()
        try:
            self._barrier.wait(DEADLINE_SECONDS)
            given = list(self._given)
            self._barrier.wait(DEADLINE_SECONDS)
        finally:
            self._turn.acquire()
        return given

    # -- as torch.distributed has them ---------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> None:
        given = self._exchange("all_reduce", tensor.clone())
        tensor.copy_(torch.stack(given).sum(0))

    def all_gather_object(self, out: list[Any], value: Any) -> None:
        out[:] = self._exchange("all_gather_object", value)

    def all_gather(self, out: list[torch.Tensor], value: torch.Tensor, group: None) -> None:
        for target, given in zip(out, self._exchange("all_gather", value.clone()), strict=True):
            target.copy_(given)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        value: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: None,
    ) -> None:
        assert sum(input_split_sizes) == value.numel()
        given = self._exchange("all_to_all", (value.clone(), input_split_sizes))
        rank = self._own.rank
        pieces = [sent.split(sizes)[rank] for sent, sizes in given]
        assert [piece.numel() for piece in pieces] == output_split_sizes
        out.copy_(torch.cat(pieces))


def in_threads(monkeypatch: pytest.MonkeyPatch, world: int, body: Callable[[int], Any]) -> Any:
    """Run ``body(rank)`` on a world of threads; return the answers, and the world."""
    ranks = RankThreads(world)
    names = ("all_reduce", "all_gather_object", "all_gather", "all_to_all_single")
    door = SimpleNamespace(**{name: getattr(ranks, name) for name in names})
    door.group = SimpleNamespace(WORLD=None)
    for room in ROOMS:
        monkeypatch.setattr(room, "dist", door)
    monkeypatch.setattr(gradient_sums.compat, "wire_device", lambda group: torch.device("cpu"))
    return ranks.run(body), ranks
