"""A state as it lies in memory, and the same laid out for what is to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.training.state import flat
from slurm_resilience.training.state.descriptor import StateDescriptor, ValueNote
from slurm_resilience.training.state.errors import StateError


@dataclass(frozen=True)
class Capture:
    """A description, and the live bytes that belong to it; nothing is copied."""

    skeleton: StateDescriptor
    views: tuple[torch.Tensor, ...]
    """uint8 of shape (bytes,), one for each of the skeleton's notes."""


class TensorSlot(NamedTuple):
    """Stands for a tensor in a decoded skeleton."""

    number: int


@dataclass
class Landing:
    """Where each tensor of a skeleton will land, and what remains to be done then."""

    skeleton: StateDescriptor
    views: list[torch.Tensor | None] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    """Run in order when all bytes are there."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.views = [None] * len(self.skeleton.notes)

    def into(self, slot: TensorSlot, tensor: torch.Tensor, path: str) -> torch.Tensor:
        """Let a tensor's bytes land in the one that this process uses.

        Raises:
            StateError: it has another shape, type or sharding.
        """
        note = self.skeleton.notes[slot.number]
        if trouble := flat.fits(tensor, note):
            raise StateError(
                f"{path} differs between peer and here: {trouble}; "
                "every rank must build the same model and optimizer"
            )
        if self.views[slot.number] is not None:
            return tensor
        if flat.alike(tensor, note):
            self.views[slot.number] = flat.view(tensor)
        else:
            # Another memory order (channels_last on one side only): lands beside, then is copied.
            beside = flat.empty(note, flat.local(tensor).device)
            self.views[slot.number] = flat.view(beside)
            self.after.append(lambda: _copy(flat.local(tensor), beside))
        self.made[slot.number] = tensor
        return tensor

    def make(self, slot: TensorSlot, like: torch.Tensor | None, path: str) -> torch.Tensor:
        """Make a tensor that this process does not have yet, on the device of a similar one."""
        if slot.number in self.made:
            return self.made[slot.number]
        note = self.skeleton.notes[slot.number]
        device = torch.device(note.device)
        if like is not None and note.device != "cpu":
            device = flat.local(like).device
        fresh = flat.empty(note, device)
        if note.whole is not None:
            fresh = _shard(fresh, note, like, path)
        return self.into(slot, fresh, path)

    def place(self, node: Any, mine: Any, like: torch.Tensor | None, path: str) -> Any:
        """Give every slot in a value a tensor: the one that stands at the same place in this
        process's value if it fits, else a new one.

        Args:
            node: a decoded value with slots.
            mine: this process's value at that place; None: it has none.
            like: a tensor whose device and sharding a new one takes.
            path: where, for messages.
        """
        if isinstance(node, TensorSlot):
            note = self.skeleton.notes[node.number]
            if isinstance(mine, torch.Tensor) and not flat.fits(mine, note):
                return self.into(node, mine, path)
            near = mine if isinstance(mine, torch.Tensor) else like
            return self.make(node, near if like is None else like, path)
        if isinstance(node, dict):
            old = mine if isinstance(mine, dict) else {}
            new = {k: self.place(v, old.get(k), like, f"{path}.{k}") for k, v in node.items()}
            if type(node) is dict:
                return new
            for key, value in new.items():
                node[key] = value
            return node
        if type(node) in (list, tuple):
            items = list(mine) if isinstance(mine, list | tuple) else []
            items += [None] * (len(node) - len(items))
            return type(node)(
                self.place(v, items[n], like, f"{path}.{n}") for n, v in enumerate(node)
            )
        return node

    def ready(self) -> list[torch.Tensor]:
        """The views to receive into, in the skeleton's order."""
        missing = [
            n for n, view in zip(self.skeleton.notes, self.views, strict=True) if view is None
        ]
        if missing:
            raise StateError(f"{missing[0].path} has no place here")
        return [view for view in self.views if view is not None]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _shard(
    shard: torch.Tensor, note: ValueNote, like: torch.Tensor | None, path: str
) -> torch.Tensor:
    if not isinstance(like, DTensor):
        raise StateError(f"{path} is sharded at the peer, and its parameter is not sharded here")
    assert note.whole is not None
    whole = torch.Size(note.whole)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=whole, stride=stride
    )
