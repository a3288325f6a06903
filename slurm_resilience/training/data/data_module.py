"""Take the dataset out of a Lightning DataModule. Lightning itself is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from slurm_resilience.errors import UsageError


class TrainingPart(NamedTuple):
    """The part of a DataModule that a training reads."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    """None: torch's own."""
    weights: Any = None
    """(samples,) of a weighted sampler; None: each sample comes once."""


_PLAIN = (BatchSampler, RandomSampler, SequentialSampler, DistributedSampler)
"""Samplers that give every sample once, in some order."""


def is_data_module(source: Any) -> bool:
    """Tell whether this is a DataModule, by the methods that Lightning calls."""
    return all(callable(getattr(source, name, None)) for name in ("setup", "train_dataloader"))


def training_part(module: Any) -> TrainingPart:
    """Prepare a DataModule as Lightning does, and return what its training reads. The size of its
    batches and their order are the session's.

    Args:
        module: a LightningDataModule.

    Raises:
        UsageError: it gives something else than one DataLoader, or one with a sampler of its own.
    """
    if callable(prepare := getattr(module, "prepare_data", None)):
        prepare()
    module.setup("fit")
    loader = module.train_dataloader()
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"s.loader: {type(module).__name__}.train_dataloader() gives a {type(loader).__name__}"
            ", not one DataLoader: give the dataset itself"
        )
    own = None if loader.collate_fn is default_collate else loader.collate_fn
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(sampler, WeightedRandomSampler):
        return TrainingPart(dataset, own, sampler.weights)
    if isinstance(sampler, SubsetRandomSampler):
        return TrainingPart(Subset(dataset, sampler.indices), own)
    for one in () if isinstance(dataset, IterableDataset) else (sampler, loader.batch_sampler):
        if isinstance(one, Sampler) and not isinstance(one, _PLAIN):
            raise UsageError(
                f"s.loader: {type(module).__name__} chooses its samples by a sampler of its own "
                f"({type(one).__name__}), which would be left out: give the dataset itself, "
                "s.loader(dataset, global_batch=…), with weights=… or shuffle=False"
            )
    return TrainingPart(dataset, own)
