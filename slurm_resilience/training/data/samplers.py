"""See how a DataLoader of the program chooses its samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_MOST = 4
"""Samplers within samplers that are looked into."""
_KNOWN = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield what chooses the samples, from the outside in."""
    # torch gives a loader whose batches are chosen a sampler as well, which it never asks.
    holder: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for _ in range(_MOST):
        if holder is None or isinstance(holder, Dataset):
            return
        if type(holder).__name__ != "_InfiniteConstantSampler":  # of a stream
            yield holder
        holder = getattr(holder, "sampler", None)


def innermost(loader: DataLoader[Any]) -> Any:
    """Return the sampler that chooses single samples; None: a stream's loader has none."""
    return next(reversed(list(samplers(loader))), None)


def unlike_session(loader: DataLoader[Any]) -> str:
    """Tell which of its samplers `s.loader` could not stand for; empty: it can for all. (Of a
    subclass nothing is known.)"""
    for one in samplers(loader):
        kind = type(one).__name__
        if type(one) not in _KNOWN:
            return kind
        if fewer := _other_samples(one, loader.dataset):
            return f"{kind} of {fewer}"
        if type(one) not in (RandomSampler, WeightedRandomSampler):
            continue
        length = len(one.weights if isinstance(one, WeightedRandomSampler) else one.data_source)
        if one.replacement != isinstance(one, WeightedRandomSampler):
            return f"{kind} with{'' if one.replacement else 'out'} replacement"
        if one.num_samples != length:
            return f"{kind} of {one.num_samples} samples"
    return ""


def _other_samples(sampler: Any, dataset: Any) -> str:
    """Tell how many samples of the dataset a sampler chooses from, if not from all; else empty."""
    source = getattr(sampler, "data_source", None)
    if source is None or source is dataset or not hasattr(dataset, "__len__"):
        return ""
    chosen, all_of_them = len(source), len(dataset)
    return "" if chosen == all_of_them else f"{chosen} of {all_of_them} samples"
