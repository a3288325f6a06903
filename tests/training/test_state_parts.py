"""A state that the rule of `rank % replica_size` cannot heal is refused before anything moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import Life, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from slurm_resilience.errors import UsageError
from slurm_resilience.training.state import Tracked, parts

pytestmark = pytest.mark.training

GRID = torch.arange(4).view(2, 2)


@pytest.mark.parametrize(
    ("mesh", "cut", "replica_size", "said"),
    [
        (torch.arange(4), [0], 4, ""),
        (GRID, [1], 2, ""),
        (GRID, [0, 1], 4, ""),
        (GRID, [1], 4, ""),
        (GRID, [], 1, ""),
        (torch.tensor([2, 3]), [0], 2, ""),
        (torch.zeros(1, 1, dtype=torch.int64), [1], 1, ""),
        (torch.arange(8).view(2, 2, 2), [1, 2], 4, ""),
        (torch.arange(4), [0], 1, "m is sharded over 4 ranks, replica_size is 1: "),
        (torch.arange(4).view(1, 4), [1], 2, "m is sharded over 4 ranks, replica_size is 2: "),
        (torch.arange(2), [0], 3, "m is sharded over 2 ranks, replica_size is 3: "),
        (GRID, [0], 2, "m: ranks 0 and 2 hold different shards, with replica_size=2 "),
        (torch.tensor([0, 2]), [0], 2, "m: ranks 0 and 2 hold different shards"),
    ],
)
def test_a_rank_must_hold_the_part_that_the_plan_thinks(
    mesh: torch.Tensor, cut: list[int], replica_size: int, said: str
) -> None:
    found = parts._trouble("m", mesh, cut, replica_size)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def sharded(rank: int, _: Any, replica_size: int, shape: tuple[int, int]) -> str:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    whole = [p.full_tensor() for p in model.parameters()]
    life = Life(rank, replica_size=replica_size)
    life.meet()
    try:
        life.track(model=model)
    except UsageError as error:
        same = zip(whole, model.parameters(), strict=True)
        assert all(torch.equal(w, p.full_tensor()) for w, p in same)
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("replica_size", "shape", "said"),
    [
        (2, (2, 2), ""),
        (
            2,
            (1, 4),
            "model.weight is sharded over 4 ranks, replica_size is 2: "
            "resilient(replica_size=4), or fully_shard(…, mesh=s.mesh())",
        ),
    ],
)
def test_every_rank_refuses_a_sharding_that_does_not_fit(
    tmp_path: Path, replica_size: int, shape: tuple[int, int], said: str
) -> None:
    assert run(sharded, 4, tmp_path, replica_size, shape) == [said] * 4


def zero(_: int, __: Any) -> str:
    model = nn.Linear(2, 2)
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with pytest.raises(UsageError) as caught:
        Tracked({"model": model, "opt": opt})
    return str(caught.value)


def test_an_optimizer_whose_state_differs_by_rank_is_refused(tmp_path: Path) -> None:
    assert run(zero, 1, tmp_path)[0].startswith("opt cannot be tracked: of a ZeroRedundancy")


def twice(rank: int, _: Any) -> str:
    life = Life(rank)
    life.meet()
    life.track(one=nn.Linear(2, 2))
    with pytest.raises(UsageError) as caught:
        life.track(other=nn.Linear(2, 2))
    return str(caught.value)


def test_track_is_called_once(tmp_path: Path) -> None:
    said = "s.track is called once in a block, with everything that is tracked"
    assert run(twice, 1, tmp_path) == [said]
