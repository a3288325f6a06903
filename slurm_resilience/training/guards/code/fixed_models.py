"""Compare models of the program that do not train: a frozen teacher, a random target.

No peer heals them. Where ranks build them from random numbers of their own, each computes with
another one, and a replaced rank with yet another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.guards.code.program_locals import program_globals, program_locals

MOST_ITEMS = 16
"""Items of a list or a dict of models that are looked at."""


def fixed_models(frame: FrameType | None, trained: Collection[int]) -> dict[str, int]:
    """Return checksums by name of the models in variables of the program that do not train, and
    belong to nothing that does: of some numbers of each parameter.

    Args:
        frame: the caller's.
        trained: ids of the parameters that are tracked.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in _variables(frame):
        if issubclass(type(value), nn.Module) and _is_fixed(value, trained):
            found.setdefault(id(value), (name, value))
    return {name: content_digest(list(one.parameters())) for name, one in found.values()}


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield name and value, of those in a plain list or dict as well."""
    own = [(name, value) for _, name, value in program_locals(frame)]
    for name, value in (*own, *program_globals(frame)):
        yield name, value
        items: list[tuple[Any, Any]] = []
        if type(value) is dict:
            items = list(value.items())
        elif type(value) in (list, tuple):
            items = list(enumerate(value))
        for key, item in items[:MOST_ITEMS]:
            yield f"{name}[{key!r}]", item


def _is_fixed(module: nn.Module, trained: Collection[int]) -> bool:
    parameters = list(module.parameters())
    if not parameters or any(id(one) in trained or not _is_plain(one) for one in parameters):
        return False
    rests = not module.training or not any(one.requires_grad for one in parameters)
    return rests and all(one.grad is None for one in parameters)


def _is_plain(one: torch.Tensor) -> bool:
    """Tell whether it has numbers, and each rank has all of them."""
    return not (nn.parameter.is_lazy(one) or one.is_meta or isinstance(one, DTensor))
