"""Refuse a source that is split over the ranks already, or that nothing splits. Pure."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.model import View
from slurm_resilience.training.data.samplers import innermost, samplers

WHOLE_SAMPLERS = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""torch's own samplers that give every rank all samples. Of a subclass nothing is known."""


def refuse(source: Any, view: View, rank: int) -> None:
    """Refuse what would train all ranks on the same batches, or leave samples out.

    Args:
        source: what `Session.loader` was given.
        view: the world that shares the batches.
        rank: this process's.

    Raises:
        UsageError: says in one line what to give instead.
    """
    if isinstance(source, DataLoader):
        _refuse_loader(source, view, rank)
        return
    if (split := _split(source)) is not None:
        raise UsageError(
            f"s.loader: this {type(source).__name__} is split by rank already ({split}), and "
            "would be split again, so that samples never come: give it as it was before that"
        )


def _refuse_loader(loader: DataLoader[Any], view: View, rank: int) -> None:
    found = list(samplers(loader))
    seats, seat = max(view.seats, view.size), view.members[rank].peer.seat
    for sampler in found:
        replicas, place = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if isinstance(replicas, int) and isinstance(place, int):
            # One of the full world is warned of when the world is smaller.
            if (replicas, place) not in ((view.size, rank), (seats, seat)):
                raise UsageError(
                    f"s.loader: the DataLoader's {type(sampler).__name__} gives the share of rank "
                    f"{place} of {replicas}, and this is rank {rank} of {view.size}: "
                    f"{_instead(loader)}"
                )
            return
    if seats == 1 or _split(loader.dataset) is not None:
        return
    # A sampler of the user's own may split by rank in a way that shows in its batches alone.
    whole = all(type(sampler) in WHOLE_SAMPLERS for sampler in found)
    if whole and not isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "s.loader: this DataLoader does not split by rank, so all ranks would train on the "
            f"same batches, and global_batch would have no effect: {_instead(loader)}"
        )


def _instead(loader: DataLoader[Any]) -> str:
    dataset, more, does = "dataset", "", "shuffles and splits"
    sampler = innermost(loader)
    if isinstance(sampler, WeightedRandomSampler):
        more, does = ", weights=…", "draws by these weights and splits"
    elif isinstance(sampler, SubsetRandomSampler):
        dataset = "torch.utils.data.Subset(dataset, indices)"
    elif isinstance(sampler, SequentialSampler):
        more, does = ", shuffle=False", "splits in the dataset's order"
    more += "" if _collates_alike(loader) else ", collate_fn=…"
    return f"give its dataset, s.loader({dataset}, global_batch=…{more}), which {does}"


def _collates_alike(loader: DataLoader[Any]) -> bool:
    return getattr(loader.collate_fn, "__name__", "") == "default_collate"


def _split(source: Any) -> str | None:
    """Tell how a stream was split by rank; None: not in a way that shows."""
    if not isinstance(source, IterableDataset):
        return None
    # Hugging Face's split_dataset_by_node.
    if (at := getattr(source, "_distributed", None)) is not None:
        return f"rank {getattr(at, 'rank', '?')} of {getattr(at, 'world_size', '?')}"
    return None
