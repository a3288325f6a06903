"""A block that is entered again finds train mode and requires_grad as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import Life, run
from torch import nn

from slurm_resilience.training.state.switches import Switches

pytestmark = pytest.mark.training


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))
    model[1].eval()
    model[0].weight.requires_grad_(False)
    return model


def modes(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


def test_what_was_on_is_on_again_and_what_was_off_stays_as_it_is() -> None:
    model = net()
    before, picture = modes(model), Switches({"m": model, "opt": object()})
    model.eval()
    model.requires_grad_(False)
    assert picture.on_again() == (
        "m.0.bias", "m.1.weight", "m.1.bias", "m.2.0.weight", "m.2.0.bias",
    )  # fmt: skip
    assert modes(model) == before
    assert not model[0].weight.requires_grad
    model[0].weight.requires_grad_(True)
    assert picture.on_again() == ()
    assert model[0].weight.requires_grad, "unfrozen in the middle of a training"


def test_torchs_own_modes_are_put_back() -> None:
    """A validation turns gradients off by a call, and a fault comes before it turns them on."""
    picture = Switches({})
    dtype = torch.get_default_dtype()
    try:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16)
        picture.on_again()
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(dtype)


def entered_again(rank: int, _: Any) -> list[Any]:
    model = net()
    life, before = Life(rank), modes(model)
    life.meet()
    life.track(model=model)
    model.eval()
    model.requires_grad_(False)
    life.meet()
    life.enter()
    found = [modes(model) == before, model[0].bias.requires_grad]
    # What the block does at its beginning counts.
    model.eval()
    life.track(model=model)
    return [*found, model.training]


def test_they_are_put_back_before_the_block_begins(tmp_path: Path) -> None:
    assert run(entered_again, 2, tmp_path) == [[True, True, False]] * 2
