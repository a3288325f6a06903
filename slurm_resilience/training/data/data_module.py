"""Take the dataset out of a Lightning DataModule. Lightning itself is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate

from slurm_resilience.errors import UsageError


class TrainingPart(NamedTuple):
    """The part of a DataModule that a training reads."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    """None: torch's own."""


def is_data_module(source: Any) -> bool:
    """Tell whether this is a DataModule, by the methods that Lightning calls."""
    return all(callable(getattr(source, name, None)) for name in ("setup", "train_dataloader"))


def training_part(module: Any) -> TrainingPart:
    """Prepare a DataModule as Lightning does, and return what its training reads. The size of its
    batches and their order are the session's.

    Args:
        module: a LightningDataModule.

    Raises:
        UsageError: it gives something else than one DataLoader.
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
    own = loader.collate_fn
    return TrainingPart(loader.dataset, None if own is default_collate else own)
