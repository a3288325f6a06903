"""Unequal shares of a batch give the gradients of the whole batch."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from state_ranks import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from slurm_resilience.training.data import ReplayLoader
from slurm_resilience.training.data.gradient_weights import GradientWeights

pytestmark = pytest.mark.training

BATCH = torch.arange(3.0).reshape(3, 1)


def listen() -> list[str]:
    """Collect what this rank warns of from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sres.training").addHandler(handler)
    return told


def gradient(rank: int, _: Any, loader_first: bool) -> float:
    """Return the gradient of the mean of three samples, of which rank 0 has two."""
    shares, model = GradientWeights(), nn.Linear(1, 1, bias=False)
    train = SimpleNamespace(weight=4 / 3 if rank == 0 else 2 / 3, unequal=3)
    other = SimpleNamespace(weight=0.5, unequal=3)
    if loader_first:
        shares.expect(train, drop_last=True)
    wrapper = nn.parallel.DistributedDataParallel(model)
    shares.wrap(wrapper)
    shares.expect(other, drop_last=True)
    shares.expect(train, drop_last=True)
    shares.given(other)
    shares.given(train)
    wrapper(BATCH[:2] if rank == 0 else BATCH[2:]).mean().backward()
    return float(model.weight.grad)


@pytest.mark.parametrize("loader_first", [True, False])
def test_gradients_are_of_the_whole_batch(tmp_path: Path, loader_first: bool) -> None:
    assert run(gradient, 2, tmp_path, loader_first) == [pytest.approx(1.0)] * 2


def hooked(rank: int, _: Any) -> tuple[int, list[str]]:
    """The same with a hook of the user's own, which comes after the wrapper."""
    told = listen()
    shares, model = GradientWeights(), nn.Linear(1, 1, bias=False)
    train = SimpleNamespace(weight=4 / 3 if rank == 0 else 2 / 3, unequal=3)
    wrapper = nn.parallel.DistributedDataParallel(model)
    shares.wrap(wrapper)
    wrapper.register_comm_hook(None, allreduce_hook)
    shares.expect(train, drop_last=True)
    for _ in range(2):
        shares.given(train)
        wrapper(BATCH[:2] if rank == 0 else BATCH[2:]).mean().backward()
        shares.committed()
    return len(wrapper._comm_hooks), told


def test_a_hook_of_the_users_own_stays_and_is_warned_of(tmp_path: Path) -> None:
    (first, told), (_, silent) = run(hooked, 2, tmp_path)
    assert first == 1
    assert [text for text in told if "without a hook of your own" in text] == told
    assert len(told) == 1
    assert not silent


def accumulates(rank: int, _: Any, weights: list[float]) -> list[str]:
    told = listen()
    shares, model = GradientWeights(), nn.Linear(1, 1, bias=False)
    train = SimpleNamespace(weight=1.0, unequal=0)
    wrapper = nn.parallel.DistributedDataParallel(model)
    shares.wrap(wrapper)
    shares.expect(train, drop_last=False)
    for weight in weights:
        train.weight, train.unequal = weight, 0 if weight == 1.0 else 5
        shares.given(train)
        with wrapper.no_sync():
            wrapper(BATCH).mean().backward()
        train.weight, train.unequal = 1.0, 0
        shares.given(train)
        wrapper(BATCH).mean().backward()
        shares.committed()
    return told


def test_unequal_shares_that_are_added_up_are_told_once(tmp_path: Path) -> None:
    (told, silent) = run(accumulates, 2, tmp_path, [1.0, 1.2, 1.2])
    assert len(told) == 1
    assert "no_sync" in told[0]
    assert not silent
    assert run(accumulates, 2, tmp_path, [1.0, 1.0]) == [[], []]


def of_two_loaders(rank: int, _: Any, sizes: list[int]) -> list[str]:
    """Batches of two loaders, one loss; of three ranks."""
    told = listen()
    shares, model = GradientWeights(), nn.Linear(1, 1, bias=False)
    wrapper = nn.parallel.DistributedDataParallel(model)
    shares.wrap(wrapper)
    loaders = [
        ReplayLoader(BATCH.repeat(20, 1), global_batch=size, rank=rank, world=3, cache=False)
        for size in sizes
    ]
    for loader in loaders:
        shares.expect(loader, drop_last=True)
        next(iter(loader))
        shares.given(loader)
    wrapper(BATCH).mean().backward()
    shares.committed()
    return told


def test_unequal_shares_of_two_loaders_are_told_where_rank_0_has_equal_weights(
    tmp_path: Path,
) -> None:
    """The first of three ranks has the same part of 16 samples as of 32; the others have not."""
    told, *others = run(of_two_loaders, 3, tmp_path, [32, 16])
    assert len(told) == 1
    assert "two loaders" in told[0]
    assert others == [[], []]
    assert run(of_two_loaders, 3, tmp_path, [32, 32]) == [[], [], []]
