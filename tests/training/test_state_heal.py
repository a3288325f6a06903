"""A rank that lost its state gets it back from its peers, over real process groups."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import run, view_of
from torch import nn

from slurm_resilience.mesh.model import Status
from slurm_resilience.training import state
from slurm_resilience.training.state import Tracked

pytestmark = pytest.mark.training

HELD = Status(generation=1, step=3, position=0)
LOST = Status()


def build(seed: int, width: int = 64) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 3)
    )
    model[3].weight = nn.Parameter(model[3].weight.to(memory_format=torch.contiguous_format))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def steps(objects: dict[str, Any], count: int, width: int = 64) -> None:
    for _ in range(count):
        loss = objects["model"](torch.randn(8, width)).square().mean()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()
        objects["scheduler"].step()
        objects["optimizer"].zero_grad()


def replicas(rank: int, group: Any, statuses: list[Status], bucket: int) -> dict[str, Any]:
    healthy = statuses[rank].healthy
    objects = build(0 if healthy else rank + 1)
    if healthy:
        steps(objects, 3)
    tracked = Tracked(objects)
    pointers = [p.data_ptr() for p in objects["model"].parameters()]
    view = view_of(statuses)
    plan = state.plan(view)
    report = state.transfer(plan, view, rank, tracked, group, bucket_bytes=bucket, verify=True)
    after = tracked.digest()
    assert pointers == [p.data_ptr() for p in objects["model"].parameters()]
    draw = (torch.rand(1).item(), random.random())
    steps(objects, 2)
    return {
        "plan": plan.kind,
        "digest": after,
        "next": tracked.digest(),
        "report": report,
        "draw": draw,
        "scheduler": objects["scheduler"].state_dict(),
        "scaler": objects["scaler"].state_dict(),
    }


@pytest.mark.parametrize(
    ("statuses", "bucket"),
    [([HELD, LOST], 32 << 20), ([HELD, LOST, HELD, HELD], 10_000), ([LOST, LOST, HELD], 7_777)],
    ids=["one to one", "three share", "relayed"],
)
def test_replicas_are_equal_after_healing_and_stay_so(
    tmp_path: Path, statuses: list[Status], bucket: int
) -> None:
    found = run(replicas, len(statuses), tmp_path, statuses, bucket)
    for key in ("digest", "next", "draw", "scheduler", "scaler"):
        assert all(one[key] == found[0][key] for one in found), key
    total = max(one["report"].received for one in found)
    for rank, one in enumerate(found):
        assert one["plan"] == "peers"
        assert one["report"].received == (0 if statuses[rank].healthy else total)
