"""Copy to host memory what a rank will write: a planner of DCP that reads from the copies.

The plan (which piece of which tensor) is made from the live state, but nothing live is touched
after `StagingBuffers.take` has returned, so the step may go on.

A tensor that several ranks hold (DDP, the replicas of HSDP) is written by one of them. Who writes
what is known after a group's first save; from then on a rank copies only what it writes itself.
The copies stay: the next save needs the same memory again.
"""

from __future__ import annotations

import dataclasses
import io
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from slurm_resilience.training.checkpoint.agreement import BrokenOff

Outline = tuple[tuple[MetadataIndex, Any], ...]
"""A plan's items with their shapes."""


class StagedPlanner(DefaultSavePlanner):
    """Plans from the live state once, then serves the copies."""

    def __init__(self, flat: dict[str, Any], broken_off: threading.Event) -> None:
        # Flattening (of sharded tensors, too) would lose empty dicts.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._broken_off = broken_off
        super().set_up_planner(flat, is_coordinator=True)
        self.local = super().create_local_plan()
        self.copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self.mine: frozenset[MetadataIndex] = frozenset()
        """After the save: the items that this rank wrote."""

    def live(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item's live data; a tree becomes bytes."""
        return super().resolve_data(item)

    def forget(self) -> None:
        """Let go of the live state."""
        self.state_dict = {}

    def set_up_planner(
        self,
        state_dict: Any,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(self.local, planner_data=frozenset(self.copies))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Only who has copied an item can write it.

        Raises:
            ValueError: no copy was made of one.
        """
        copied = frozenset[MetadataIndex]().union(*(plan.planner_data for plan in all_plans))
        held = {item.index for plan in all_plans for item in plan.items}
        if lost := held - copied:
            raise ValueError(
                f"the tracked state has changed on some ranks only: {min(i.fqn for i in lost)}"
            )
        return super().create_global_plan(
            [
                dataclasses.replace(
                    plan,
                    items=[item for item in plan.items if item.index in plan.planner_data],
                    planner_data=None,
                )
                for plan in all_plans
            ]
        )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.mine = frozenset(item.index for item in new_plan.items)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the copy of an item, which is written next.

        Raises:
            BrokenOff: no more is to be written; the next save may use the copies already.
        """
        if self._broken_off.is_set():
            raise BrokenOff("its world ended before it was written whole")
        return self.copies[write_item.index]


class StagingBuffers:
    """Keeps the host memory and the division of work from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._outline: Outline = ()
        self._mine: frozenset[MetadataIndex] | None = None
        self._group: object = None

    def take(
        self, flat: dict[str, Any], group: object, broken_off: threading.Event
    ) -> StagedPlanner:
        """Copy what this rank may have to write.

        Args:
            flat: from `parts.take_apart`.
            group: whose ranks save; the division of work holds only for these.
            broken_off: set when the writing shall end.
        """
        planner = StagedPlanner(flat, broken_off)
        outline = _outline(planner.local)
        known = self._group is group and outline == self._outline
        wanted = self._mine if known else None
        self._group, self._outline = group, outline
        self._mine = wanted
        if wanted is None:
            self._buffers = {}
        on_gpu = False
        for item in planner.local.items:
            if wanted is not None and item.index not in wanted:
                continue
            data = planner.live(item)
            if isinstance(data, torch.Tensor):
                planner.copies[item.index] = self._copy(item.index, data)
                on_gpu |= data.is_cuda
            else:
                planner.copies[item.index] = data
        if on_gpu:
            torch.cuda.synchronize()
        planner.forget()
        return planner

    def learn(self, planner: StagedPlanner) -> None:
        """Note that a save went well: next time copy only what this rank wrote."""
        self._mine = planner.mine
        self._buffers = {k: v for k, v in self._buffers.items() if k in planner.mine}

    def forget(self) -> None:
        """Note that a save went wrong: next time copy everything."""
        self._mine = self._group = None

    def _copy(self, index: MetadataIndex, live: torch.Tensor) -> torch.Tensor:
        old = self._buffers.get(index)
        if old is None or old.shape != live.shape or old.dtype != live.dtype:
            old = torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.is_cuda)
            self._buffers[index] = old
        old.copy_(live.detach(), non_blocking=live.is_cuda)
        return old


def _outline(plan: SavePlan) -> Outline:
    return tuple(
        (item.index, item.tensor_data.chunk if item.tensor_data else None) for item in plan.items
    )
