"""A training's state as tensors with names, and back.

Every value of the state becomes a *tree*: its structure, in which tensors are replaced by their
names. Tensors are saved each for itself, so that DCP can cut them anew for another number of ranks;
the tree is one small object. Modules and optimizers go through torch's own state-dict functions,
which name a parameter the same with and without DDP, FSDP2 and compilation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from slurm_resilience.errors import UsageError
from slurm_resilience.training import compat

TREE = "tree:"
"""Begins the key of a tree; a tensor's key begins with its value's name."""


LOOSE = "loose parameters"
"""Stands for a module, in the names of what an optimizer keeps for parameters that none holds."""


class Ref(NamedTuple):
    """Stands in a tree where a tensor was."""

    key: str


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a loader, a scaler: anything that gives and takes its state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def take_apart(
    state: Mapping[str, Any], per_rank: Collection[str] = (), rank: int = 0
) -> dict[str, Any]:
    """Name every tensor of a state. Copies nothing.

    Args:
        state: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, and plain
            values (numbers, tensors, dicts and lists of them), by name.
        per_rank: names whose values are saved for each rank.
        rank: this rank.

    Returns:
        Tensors by key, and under ``tree:<name>`` each value's tree.

    Raises:
        UsageError: an optimizer's parameters are in none of the modules, or two tensors would get
            the same key.
    """
    flat: dict[str, Any] = {}
    for name, value in state.items():
        path = own_name(name, rank) if is_own(name, value, per_rank) else name
        flat[TREE + path] = split(values_of(value, state, name), path, flat)
    return flat


def is_own(name: str, value: Any, per_rank: Collection[str]) -> bool:
    """Tell whether each rank has a value of its own: by its name, or as the value itself says."""
    return name in per_rank or has_successors(value)


def has_successors(value: Any) -> bool:
    """Tell whether ranks that have saved no such value of their own take that of the first."""
    return bool(getattr(value, "goes_to_new_ranks", False))


def own_name(name: str, rank: int) -> str:
    """Return the name of a value that differs from rank to rank."""
    return f"{name}@{rank}"


def values_of(value: Any, state: Mapping[str, Any], name: str) -> Any:
    """Return the part of a value that is saved."""
    if isinstance(value, nn.Module):
        return get_model_state_dict(value)
    if isinstance(value, torch.optim.Optimizer):
        if not value.state:
            # Torch would make a step with gradients of zero to have something to save.
            return {"state": {}, "param_groups": _groups(value)}
        return get_optimizer_state_dict(_owner(value, state, name), value)
    return value.state_dict() if isinstance(value, Stateful) else value


def split(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """Split a value into a tree and its tensors, which are put into ``tensors``."""
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise UsageError(f"two tensors of the state are called {path}; rename a key")
        tensors[path] = value
        return Ref(path)
    if type(value) in (dict, OrderedDict):
        return type(value)(
            (key, split(one, f"{path}.{key}", tensors)) for key, one in value.items()
        )
    if type(value) in (list, tuple):
        return type(value)(split(one, f"{path}.{i}", tensors) for i, one in enumerate(value))
    return value


def join(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """Join a tree and its tensors: the opposite of `split`."""
    if isinstance(tree, Ref):
        return tensor(tree.key)
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, join(one, tensor)) for key, one in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(join(one, tensor) for one in tree)
    return tree


def keys_of(tree: Any) -> list[str]:
    """Return the keys of a tree's tensors."""
    keys: list[str] = []
    join(tree, keys.append)
    return keys


def has_shape(value: Any) -> bool:
    """Tell whether this value's tensors keep their shapes for life."""
    return isinstance(value, nn.Module | torch.optim.Optimizer)


def put_back(name: str, value: Any, state: Mapping[str, Any], saved: Any) -> Any:
    """Give a value its saved state, in place.

    Returns:
        What belongs at ``state[name]`` now: the value itself, or the saved one where the value
        cannot be changed (a number).
    """
    if isinstance(value, nn.Module):
        set_model_state_dict(value, saved)
    elif isinstance(value, torch.optim.Optimizer):
        if saved["state"]:
            set_optimizer_state_dict(_owner(value, state, name), value, saved)
        else:
            value.state.clear()
            for group, old in zip(value.param_groups, saved["param_groups"], strict=True):
                group.update(old)
    elif isinstance(value, Stateful):
        value.load_state_dict(saved)
    elif isinstance(value, dict):
        value.clear()
        value.update(saved)
    elif isinstance(value, list):
        value[:] = saved
    else:
        return saved
    return value


def template(
    name: str, path: str, value: Any, state: Mapping[str, Any], tree: Any
) -> dict[str, Any]:
    """Return the tensors that a load writes into, as far as the live value has them.

    An optimizer that has not stepped yet is given its state first (torch makes a step with
    gradients of zero for that); its gradients are dropped.

    Raises:
        ValueError: a module or an optimizer has other tensors than the checkpoint.
    """
    own: dict[str, Any] = {}
    if isinstance(value, torch.optim.Optimizer):
        if not keys_of(tree):
            return {}
        if not value.state:
            value.zero_grad(set_to_none=True)
        split(get_optimizer_state_dict(_owner(value, state, name), value), path, own)
    else:
        split(values_of(value, state, name), path, own)
    saved = {*keys_of(tree)}
    if has_shape(value):
        if lacking := sorted(own.keys() - saved):
            raise ValueError(f"the checkpoint has no {lacking[0]} ({len(lacking)} are missing)")
        if strange := sorted(saved - own.keys()):
            raise ValueError(f"{name} has no {strange[0]} ({len(strange)} are too many)")
    return {key: tensor for key, tensor in own.items() if key in saved}


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _owner(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], name: str) -> nn.Module:
    """Return the module whose parameters an optimizer steps; one around several of them if need
    be."""
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    owners = {
        key: module
        for key, module in state.items()
        if isinstance(module, nn.Module) and any(id(one) in own for one in module.parameters())
    }
    left = own - {id(one) for module in owners.values() for one in module.parameters()}
    if loose := {key: one for key, one in state.items() if id(one) in left}:
        owners[LOOSE] = compat.holder_of({k.replace(".", "-"): one for k, one in loose.items()})
        left -= {id(one) for one in loose.values()}
    if left:
        raise UsageError(
            f"{len(left)} parameters of the optimizer {name!r} are in no module of the state; "
            "put the module that it steps there too, or the parameter by a name of its own"
        )
    whole = [one for one in owners.values() if own <= {id(part) for part in one.parameters()}]
    return whole[0] if whole else nn.ModuleDict(owners)
