"""Take the dataset out of a Lightning DataModule. Lightning itself is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import (
    DataLoader,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from slurm_resilience.errors import UsageError
from slurm_resilience.training.data.samplers import innermost, unlike_session


class TrainingPart(NamedTuple):
    """The part of a DataModule that a training reads."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    """None: torch's own."""
    weights: Any = None
    """(samples,) of a weighted sampler; None: each sample comes once."""


def is_data_module(source: Any) -> bool:
    """Tell whether this is a DataModule, by the methods that Lightning calls."""
    return all(callable(getattr(source, name, None)) for name in ("setup", "train_dataloader"))


def training_part(module: Any) -> TrainingPart:
    """Prepare a DataModule as Lightning does, and return what its training reads. The size of its
    batches and their order are the session's.

    Args:
        module: a LightningDataModule.

    Raises:
        UsageError: it gives something else than one DataLoader, or one of whole batches, or with a
            sampler of its own.
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
    name = type(module).__name__
    if loader.batch_sampler is None:
        raise UsageError(
            f"s.loader: the DataLoader of {name} gives whole batches as its dataset makes them "
            "(batch_size=None): give a dataset of samples, s.loader(dataset, global_batch=…)"
        )
    if other := unlike_session(loader):
        raise UsageError(
            f"s.loader: {name} chooses its samples by a sampler of its own ({other}), which would "
            "be left out: give the dataset itself, s.loader(dataset, global_batch=…), with "
            "weights=…, shuffle=False or steps=… as it needs"
        )
    own = None if loader.collate_fn is default_collate else loader.collate_fn
    dataset, sampler = loader.dataset, innermost(loader)
    if isinstance(sampler, WeightedRandomSampler):
        return TrainingPart(dataset, own, sampler.weights)
    if isinstance(sampler, SubsetRandomSampler):
        return TrainingPart(Subset(dataset, sampler.indices), own)
    return TrainingPart(dataset, own)
