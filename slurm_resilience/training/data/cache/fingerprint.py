"""Name a source without reading a sample from it, so that a restarted process finds its batches.

The name is made from the source's type and length, its plain settings (numbers, strings, paths),
some bytes of the arrays it holds in memory, and the program: its file with size and time, and its
arguments. Another data set behind the same settings looks the same: name it with ``fingerprint=``,
or give the dataset an attribute ``fingerprint`` that changes with its contents.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAMES = ("fingerprint", "_fingerprint")
"""Attributes by which a source names its own contents (the second is Hugging Face's)."""
PLAIN = (bool, int, float, str, bytes, Path, type(None))
BLOCK_BYTES = 4096
BLOCKS = 32
"""Of a large array so many blocks are looked at, all over it."""


def own_name(source: Any) -> str:
    """Return the name that a source gives itself; empty: it gives none."""
    for name in NAMES:
        given = vars(source).get(name) if hasattr(source, "__dict__") else None
        given = given or getattr(type(source), name, None)
        if isinstance(given, str):
            return given
    return ""


def fingerprint(source: Any, collate_fn: Any = None) -> str:
    """Return 32 hex digits, the same in every process that makes the source alike.

    Args:
        source: the dataset, or whatever gives samples.
        collate_fn: makes a batch of samples.
    """
    digest = hashlib.blake2b(digest_size=16)
    for word in (*_program(), *_thing(source), *_thing(collate_fn)):
        data = word.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _program() -> Iterator[str]:
    """Yield the running script with size and time: an edited one must not get its old batches."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None:
        yield os.path.realpath(main)
        try:
            found = Path(main).stat()
            yield f"{found.st_size} {found.st_mtime_ns}"
        except OSError:
            yield "absent"
    yield from sys.argv[1:]


def _thing(thing: Any) -> Iterator[str]:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    yield f"{named.__module__}.{named.__qualname__}"
    if name := own_name(thing):
        yield name
        return
    try:
        yield str(len(thing))
    except TypeError:
        yield "no length"
    settings = vars(thing) if hasattr(thing, "__dict__") else {}
    for key in sorted(map(str, settings)):
        yield key
        value = settings.get(key)
        yield from _setting(value)
        # TensorDataset holds a tuple: two of equal length in one program are common.
        if isinstance(value, list | tuple) and len(value) <= BLOCKS:
            for item in value:
                yield from _setting(item)


def _setting(value: Any) -> Iterator[str]:
    if isinstance(value, PLAIN):
        yield repr(value)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_contiguous():
        yield str(value.dtype)
        value = value.detach().reshape(-1).view(torch.uint8).numpy().reshape(*value.shape, -1)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.flags.c_contiguous:
        yield f"{value.dtype} {value.shape}"
        flat = value.reshape(-1).view(np.uint8)
        last = flat.size - BLOCK_BYTES
        starts = range(1) if last <= 0 else [last * turn // (BLOCKS - 1) for turn in range(BLOCKS)]
        for start in starts:
            yield hashlib.blake2b(flat[start : start + BLOCK_BYTES].tobytes()).hexdigest()
