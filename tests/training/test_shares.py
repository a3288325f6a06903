"""Unequal shares of a batch give the gradients of the whole batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from state_ranks import run
from torch import nn

from slurm_resilience.training.shares import Shares

pytestmark = pytest.mark.training

BATCH = torch.arange(3.0).reshape(3, 1)


def gradient(rank: int, _: Any, loader_first: bool) -> float:
    """Of the mean of three samples, of which rank 0 has two."""
    shares, model = Shares(), nn.Linear(1, 1, bias=False)
    train = SimpleNamespace(weight=4 / 3 if rank == 0 else 2 / 3)
    other = SimpleNamespace(weight=0.5)
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
