"""Name a source in a few bytes, without reading a sample from it.

Two sources with the same fingerprint would share cached batches, so it looks at all that can be
seen at no cost: types, the files of their code, settings (the program's arguments too), paths, the
bytes of small arrays and a part of large ones. When in doubt it differs; the price is a cold cache,
never a wrong batch. What it cannot see is a change of the data behind an unchanged path, or of an
environment variable: name it with ``fingerprint=``, or give the dataset an attribute
``fingerprint`` that changes with it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_DEEP = 6
_MANY = 4096
_BLOCK = 4096
_BLOCKS = 32
_PICKLE = 5
"""The protocol in which an object tells what it is made of without copying large parts."""
_NAMES = ("fingerprint", "_fingerprint")
"""Attributes by which a source names its own contents (the second is Hugging Face's)."""


def fingerprint(*things: Any) -> str:
    """32 hex digits that stand for ``things``; the same in every process that makes them alike."""
    digest = hashlib.blake2b(digest_size=16)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    of_things = (_words(thing, _DEEP, ()) for thing in things)
    for text in chain(_file(main), _words(sys.argv[1:], 2, ()), *of_things):
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()


def _file(path: str | None) -> Iterator[bytes]:
    """Yield a file by its name, length and time: an edited script must not get its old batches."""
    if path is not None:
        yield os.path.realpath(path).encode(errors="surrogateescape")
        try:
            found = Path(path).stat()
            yield f"{found.st_size} {found.st_mtime_ns}".encode()
        except (OSError, ValueError):
            yield b"absent"


def _words(thing: Any, deep: int, above: tuple[int, ...]) -> Iterator[bytes]:
    kind = type(thing)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if thing is None or isinstance(thing, bool | int | float | complex | str | bytes | np.generic):
        yield repr(thing).encode(errors="surrogatepass")
    elif isinstance(thing, Path):
        yield from _file(str(thing))
    elif deep == 0 or id(thing) in above or isinstance(thing, ModuleType):
        return
    elif isinstance(thing, torch.Tensor):
        yield f"{thing.dtype} {tuple(thing.shape)}".encode()
        if thing.layout == torch.strided and thing.device.type == "cpu" and thing.is_contiguous():
            yield from _bytes(thing.detach().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(thing, np.memmap):
        yield f"{thing.dtype} {thing.shape} {thing.offset}".encode()
        yield from _file(thing.filename and str(thing.filename))
    elif isinstance(thing, np.ndarray):
        yield f"{thing.dtype} {thing.shape}".encode()
        if not thing.dtype.hasobject and thing.flags.c_contiguous:
            yield from _bytes(thing.reshape(-1).view(np.uint8))
    else:
        yield from _parts(thing, deep - 1, (*above, id(thing)))


def _parts(thing: Any, deep: int, above: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the words of something that is made of other things."""
    if isinstance(thing, CodeType):
        yield thing.co_code
        yield from _all(thing.co_consts, deep, above)
        yield " ".join(thing.co_names).encode()
    elif isinstance(thing, FunctionType):
        yield thing.__qualname__.encode()
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
        yield from _all((thing.__code__, thing.__defaults__, *cells), deep, above)
        for name in thing.__code__.co_names:
            # A setting of the module's. Other things there may change with every call.
            if isinstance(value := thing.__globals__.get(name), bool | int | float | str):
                yield f"{name}={value!r}".encode(errors="surrogatepass")
    elif isinstance(thing, MethodType):
        yield from _all((thing.__func__, thing.__self__), deep, above)
    elif isinstance(thing, type):
        yield f"{thing.__module__}.{thing.__qualname__}".encode()
        yield from _file(getattr(sys.modules.get(thing.__module__), "__file__", None))
    elif isinstance(thing, dict):
        yield from _all(chain.from_iterable(thing.items()), deep, above, len(thing))
    elif isinstance(thing, list | tuple | range):
        step = max(1, len(thing) // _MANY)
        yield from _all(chain(thing[::step], thing[-1:]), deep, above, len(thing))
    elif isinstance(thing, set | frozenset):
        yield from sorted(b"".join(_words(item, deep, above)) for item in islice(thing, _MANY))
    else:
        yield from _object(thing, deep, above)


def _object(thing: Any, deep: int, above: tuple[int, ...]) -> Iterator[bytes]:
    module = sys.modules.get(type(thing).__module__)
    yield from _file(getattr(module, "__file__", None))
    given = _members(thing)
    for name in _NAMES:
        if isinstance(own := given.get(name, getattr(type(thing), name, None)), str):
            yield own.encode()
            return
    for name in sorted(map(str, given)):
        yield name.encode()
        yield from _words(given.get(name), deep, above)
    if not given and not hasattr(thing, "__dict__"):
        yield from _words(_taken_apart(thing), deep, above)


def _members(thing: Any) -> dict[str, Any]:
    """Return what an object is made of, by name: its variables, and what it has in slots."""
    members = {
        name: getattr(thing, name)
        for part in type(thing).__mro__
        for name, member in vars(part).items()
        if isinstance(member, MemberDescriptorType)
        and not name.startswith("__")
        and hasattr(thing, name)
    }
    return members | (vars(thing) if hasattr(thing, "__dict__") else {})


def _taken_apart(thing: Any) -> Any:
    """Return an object that shows nothing (one of C) as pickle would have it; None: it cannot be
    had."""
    try:
        parts = thing.__reduce_ex__(_PICKLE)
    except Exception:
        return None  # a lock, an open file
    if not isinstance(parts, tuple):
        return parts
    # What it holds comes last, one by one.
    return [list(islice(one, _MANY)) if isinstance(one, Iterator) else one for one in parts]


def _all(
    things: Iterable[Any], deep: int, above: tuple[int, ...], count: int = 0
) -> Iterator[bytes]:
    yield str(count).encode()
    for thing in islice(things, 2 * _MANY + 2):
        yield from _words(thing, deep, above)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _bytes(flat: Any) -> Iterator[bytes]:
    """All of a small array, evenly spread blocks of a large one. ``flat``: (n,) uint8."""
    if flat.size <= _BLOCK * _BLOCKS:
        yield flat.tobytes()
        return
    last = flat.size - _BLOCK
    for turn in range(_BLOCKS):
        at = last * turn // (_BLOCKS - 1)
        yield flat[at : at + _BLOCK].tobytes()
