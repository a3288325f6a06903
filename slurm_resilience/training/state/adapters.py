"""Read each kind of tracked object, and land a state in it: modules, optimizers, tensors, and any
object with `state_dict` and `load_state_dict` (schedulers, gradient scalers, one's own).

Modules and optimizers are read directly, not through their state_dict, because their own tensors
are wanted: the parameter that the optimizer refers to must stay that very tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from slurm_resilience.errors import UsageError
from slurm_resilience.training import compat
from slurm_resilience.training.state.describe import BUFFERS, Landing
from slurm_resilience.training.state.errors import StateError
from slurm_resilience.training.state.generators import TrackedGenerator, is_generator


@dataclass(frozen=True)
class Choice:
    """The parameters (with their optimizer state) that are state; the others never change."""

    trainable_only: bool = False
    named: Callable[[str], bool] | None = None

    @property
    def everything(self) -> bool:
        return not self.trainable_only and self.named is None

    def takes(self, name: str, parameter: torch.Tensor) -> bool:
        if self.trainable_only and not parameter.requires_grad:
            return False
        return self.named is None or self.named(name)

    def takes_buffer(self, name: str) -> bool:
        """Buffers of a frozen base do not change; a name filter may still ask for them."""
        return not self.trainable_only and (self.named is None or self.named(name))


def unwrap(thing: Any) -> Any:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile; a random
    generator as what can be tracked."""
    if is_generator(thing):
        return TrackedGenerator(thing)
    while isinstance(thing, nn.Module):
        if isinstance(thing, nn.parallel.DistributedDataParallel | nn.DataParallel):
            thing = thing.module
        elif (inside := compat.uncompiled(thing)) is not thing:
            thing = inside
        else:
            break
    return thing


def kind_of(name: str, thing: Any) -> str:
    """Tell whether it is a module, an optimizer, a tensor or another object. An optimizer that
    keeps its state in its own way counts as another object.

    Raises:
        StateError: it is nothing that can be tracked.
        UsageError: it holds another state on each rank.
    """
    if any(part.__name__ == "ZeroRedundancyOptimizer" for part in type(thing).__mro__):
        raise UsageError(
            f"{name} cannot be tracked: of a ZeroRedundancyOptimizer each rank holds another part; "
            "use fully_shard with resilient(replica_size=…), or a plain optimizer"
        )
    if isinstance(thing, nn.Module):
        return "module"
    if isinstance(thing, torch.optim.Optimizer):
        return "other" if has_own_state(thing) else "optimizer"
    if isinstance(thing, torch.Tensor):
        return "tensor"
    if callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    ):
        return "other"
    raise StateError(
        f"{name} cannot be tracked: a {type(thing).__name__} has no state_dict and load_state_dict"
    )


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer keeps its state in its own way: it is moved by what its state_dict
    gives then, and its load_state_dict takes."""
    kind, plain = type(optimizer), torch.optim.Optimizer
    return (
        kind.state_dict is not plain.state_dict or kind.load_state_dict is not plain.load_state_dict
    )


def reshard(module: nn.Module) -> None:
    """Give an FSDP2 module its shards back: a fault inside forward leaves the gathered parameters
    in their place."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            compat.to_shards(part)


def read_module(module: nn.Module, choice: Choice) -> dict[str, Any]:
    """Parameters and buffers (also those that are not saved: they may carry over steps)."""
    reshard(module)
    return {
        "parameters": {n: p for n, p in module.named_parameters() if choice.takes(n, p)},
        BUFFERS: {n: b for n, b in module.named_buffers() if choice.takes_buffer(n)},
        "unsaved": sorted(compat.unsaved_buffers(module)),
        "extra": {n: m.get_extra_state() for n, m in _with_extra(module, choice)},
    }


def written_by_forward(module: nn.Module) -> set[int]:
    """Ids of the parameters that a forward writes to by design."""
    return {id(p.weight) for p in module.modules() if getattr(p, "max_norm", None) is not None}


def read_replica(module: nn.Module, choice: Choice) -> dict[str, Any]:
    """Parameters that every replica has alike after a step."""
    reshard(module)
    free = written_by_forward(module)
    return {n: p for n, p in module.named_parameters() if choice.takes(n, p) and id(p) not in free}


def read_frozen(module: nn.Module, choice: Choice) -> dict[str, Any]:
    """Parameters that are left out of the state because they never change."""
    reshard(module)
    return {n: p for n, p in module.named_parameters() if not choice.takes(n, p)}


def land_module(
    name: str, module: nn.Module, there: dict[str, Any], choice: Choice, landing: Landing
) -> None:
    """Lay out a module."""
    here = read_module(module, choice)
    theirs, mine = there["parameters"], here["parameters"]
    if odd := sorted(theirs.keys() ^ mine.keys()):
        side = "the peer" if odd[0] in theirs else "this process"
        raise StateError(f"only {side} has {name}.{odd[0]}; every rank must build the same model")
    for key, slot in theirs.items():
        landing.into(slot, mine[key], f"{name}.{key}")
    for key, slot in there[BUFFERS].items():
        fresh = landing.place(slot, here[BUFFERS].get(key), None, f"{name}.{key}")
        if fresh is not here[BUFFERS].get(key):
            saved = key not in there["unsaved"]
            landing.after.append(partial(_put_buffer, module, key, fresh, persistent=saved))
    for key in here[BUFFERS].keys() - there[BUFFERS].keys():
        # It is None at the peer, or not made yet.
        landing.after.append(partial(_put_buffer, module, key, None, persistent=True))
    for key, owner in _with_extra(module, choice):
        if key in there["extra"]:
            extra = landing.place(
                there["extra"][key], here["extra"].get(key), None, f"{name}.{key}"
            )
            landing.after.append(lambda owner=owner, extra=extra: owner.set_extra_state(extra))  # type: ignore[misc]


def _put_buffer(
    module: nn.Module, key: str, tensor: torch.Tensor | None, *, persistent: bool
) -> None:
    """Give a module a buffer that forward has made or enlarged at the peer (a table of positions, a
    mask), as it will here. Where there is no place for it, forward makes it anew."""
    path, _, name = key.rpartition(".")
    with contextlib.suppress(AttributeError):
        compat.put_buffer(module.get_submodule(path), name, tensor, persistent=persistent)


def _with_extra(module: nn.Module, choice: Choice) -> Iterator[tuple[str, nn.Module]]:
    if choice.everything:
        for name, part in module.named_modules():
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                yield name, part


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order in which an optimizer's state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def read_optimizer(optimizer: torch.optim.Optimizer, left_out: set[int]) -> dict[str, Any]:
    """State by the parameter's number, and the groups' options.

    Args:
        optimizer: the optimizer.
        left_out: ids of parameters whose state is not moved.
    """
    parameters = parameters_of(optimizer)
    return {
        "count": len(parameters),
        "state": {
            number: dict(optimizer.state[p])
            for number, p in enumerate(parameters)
            if id(p) not in left_out and p in optimizer.state
        },
        "groups": options_of(optimizer),
    }


def loose_parameters(objects: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return by name what optimizers train and no module holds (a temperature, the weights of
    several losses, a prompt): it is state as any parameter is.

    Args:
        objects: what is tracked, unwrapped.
    """
    held = {
        id(tensor)
        for thing in objects.values()
        for tensor in (thing.parameters() if isinstance(thing, nn.Module) else (thing,))
    }
    found: dict[str, torch.Tensor] = {}
    for name, thing in objects.items():
        for number, one in enumerate(
            parameters_of(thing) if isinstance(thing, torch.optim.Optimizer) else ()
        ):
            if id(one) not in held:
                held.add(id(one))
                found[f"{name}.parameter{number}"] = one
    return found


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Options of each group: learning rate and the like."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def noted_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, so that nothing changes them."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        for options in options_of(optimizer)
    ]


@torch.no_grad()
def put_options(optimizer: torch.optim.Optimizer, noted: list[dict[str, Any]]) -> None:
    """Give the groups the options that were noted; others stay."""
    for group, options in zip(optimizer.param_groups, noted, strict=False):
        for key, value in options.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def land_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    there: dict[str, Any],
    left_out: set[int],
    landing: Landing,
) -> None:
    """Lay out an optimizer. What a fresh one lacks is made here, with its parameter's device and
    sharding; no step is run for it."""
    parameters = parameters_of(optimizer)
    if there["count"] != len(parameters) or len(there["groups"]) != len(optimizer.param_groups):
        raise StateError(
            f"{name} has {there['count']} parameters in {len(there['groups'])} groups at the peer, "
            f"{len(parameters)} in {len(optimizer.param_groups)} here"
        )
    states: dict[int, dict[Any, Any]] = {}
    for number, state in there["state"].items():
        parameter = parameters[number]
        mine = optimizer.state.get(parameter, {})
        path = f"{name}.{number}"
        states[number] = landing.place(state, mine, parameter, path)
    groups = [
        landing.place(group, mine, None, f"{name}.groups")
        for group, mine in zip(there["groups"], optimizer.param_groups, strict=True)
    ]

    def after() -> None:
        for number, parameter in enumerate(parameters):
            if number in states:
                optimizer.state[parameter] = states[number]
            elif id(parameter) not in left_out:
                optimizer.state.pop(parameter, None)
        for mine, options in zip(optimizer.param_groups, groups, strict=True):
            mine.update(options)

    landing.after.append(after)


def land_other(name: str, thing: Any, there: Any, landing: Landing) -> None:
    """Lay out anything with load_state_dict."""
    placed = landing.place(there, thing.state_dict(), None, name)
    landing.after.append(lambda: thing.load_state_dict(placed))
