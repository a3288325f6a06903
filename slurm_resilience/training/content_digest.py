"""One number for what a batch or a sample holds, to compare it between ranks. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

ENOUGH_BYTES = 1 << 12
"""Bytes of a tensor, an array or a string that count: two that differ at all differ there."""
DEEP = 6
"""Containers within containers that are looked into."""
MANY = 64
"""Items of a container that are looked at."""


def content_digest(value: Any) -> int:
    """Return a number that is equal for equal contents, and never 0. It fits an int64.

    Args:
        value: tensors, arrays, numbers, strings, and containers of these; of anything else only
            the type counts.
    """
    total = hashlib.blake2b(digest_size=8)
    for part in _bytes(value, DEEP):
        total.update(len(part).to_bytes(4, "little"))
        total.update(part)
    return int.from_bytes(total.digest(), "little") >> 1 | 1


def _bytes(value: Any, deep: int) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if value.layout == torch.strided and not value.is_meta:
            some = value.detach().reshape(-1)[: ENOUGH_BYTES // value.element_size()]
            yield some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        if not value.dtype.hasobject:
            yield value.reshape(-1)[: ENOUGH_BYTES // max(1, value.itemsize)].tobytes()
    elif isinstance(value, str | bytes):
        begin = value[:ENOUGH_BYTES]
        yield begin if isinstance(begin, bytes) else begin.encode(errors="surrogatepass")
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()
        if deep:
            yield from _inside(value, deep - 1)


def _inside(value: Any, deep: int) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for key in list(value)[:MANY]:
            yield repr(key).encode()
            yield from _bytes(value[key], deep)
    elif isinstance(value, list | tuple | range):
        yield str(len(value)).encode()
        for item in value[:MANY]:
            yield from _bytes(item, deep)
