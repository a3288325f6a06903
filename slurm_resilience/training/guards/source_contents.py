"""Sum up what a dataset in memory holds, to find ranks that hold other samples. Pure.

A dataset that was split or shuffled at random, without a seed, is another one in each process:
`s.loader` shares out numbers of samples, so some would come twice, and others never.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from slurm_resilience.training.content_digest import content_digest

DEEP = 4
"""Datasets within datasets that are looked into."""
_HOLDS = (list, tuple, np.ndarray, torch.Tensor)


def contents_word(source: Any, weights: Any = None) -> int:
    """Return a number for what can be seen without asking for a sample: which ones a `Subset` has,
    and lists and arrays with one item for each sample; 0: nothing.

    Args:
        source: a dataset, or another source of samples.
        weights: by which they are drawn, if they are.
    """
    parts = list(_parts(source, DEEP)) + ([] if weights is None else [weights])
    return content_digest(parts) if parts else 0


def _parts(source: Any, deep: int) -> Iterator[Any]:
    if isinstance(source, _HOLDS):
        yield source
    elif not deep:
        return
    elif isinstance(source, Subset):
        yield source.indices
        yield from _parts(source.dataset, deep - 1)
    elif isinstance(source, ConcatDataset):
        for one in source.datasets:
            yield from _parts(one, deep - 1)
    elif isinstance(source, TensorDataset):
        yield source.tensors
    else:
        yield from _attributes(source, deep - 1)


def _attributes(source: Any, deep: int) -> Iterator[Any]:
    """Yield the parts of a dataset of the program's own."""
    named = getattr(source, "__dict__", {})
    try:
        length = len(source)
        kept = [one for one in named.values() if type(one) in _HOLDS and len(one) == length]
    except TypeError:  # it has no length, or an array has none
        return
    yield from kept
    if "dataset" in named:
        yield from _parts(named["dataset"], deep)
