"""Keep Python's collector of garbage from looking through torch at each recovery.

The worlds of FSDP that were left hang in reference cycles, so a collection has to follow them. With
torch loaded it took 0.25 s, in which the process stands still; without what was there before the
training it takes 0.02 s.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, compress, repeat
from operator import call, is_not
from typing import Any

AT_ONCE = 10_000
"""Objects that are asked at once what they hold."""

_older: list[Any] = []
"""Objects that were there before the training. The collector does not list them meanwhile."""


@contextlib.contextmanager
def older_objects_left_out(*, listed: bool = True) -> Iterator[None]:
    """Have collections within this block leave out what was made before it.

    An object from before that the program drops is let go of all the same, unless a reference cycle
    holds it: then at the first collection after the block. Where the program has had objects left
    out itself (`gc.freeze`), these stay so for good.

    Args:
        listed: whether `all_objects` knows them: with torch loaded, this takes 0.15 s.
    """
    is_ours = gc.get_freeze_count() == 0
    if listed:
        _older[:] = _listed()
    gc.freeze()
    try:
        yield
    finally:
        let_go_of_older_objects()
        if is_ours:
            gc.unfreeze()


def all_objects() -> list[Any]:
    """Return the objects of this process; those from before the training until they are let go
    of."""
    found = _listed()
    found += _older
    return _with_tuples(found)


def newer_objects() -> list[Any]:
    """Return the objects that were made since the training began."""
    return _with_tuples(_listed())


def _listed() -> list[Any]:
    """Return what the collector lists, without tuples.

    One that another thread is still making (`tuple(…)`) is listed, too, and that thread fails with
    a SystemError if it is referred to when it is ready: it cost the mesh's thread, and so the rank.
    So all that refers to them is done in one call into C, in which no other thread runs; a
    collection would run others.
    """
    found, kinds, kept = list[Any](), list[type](), list[Any]()
    steps: tuple[Callable[[], None], ...] = (
        partial(found.extend, chain.from_iterable(map(call, (gc.get_objects,)))),
        partial(kinds.extend, map(type, found)),
        partial(kept.extend, compress(found, map(is_not, kinds, repeat(tuple)))),
        found.clear,
    )
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        deque(map(call, steps), maxlen=0)
    finally:
        if was_enabled:
            gc.enable()
    # What has done this is listed, too, and would hold all others.
    others = [one for one in kept if one is not kept]
    kept.clear()
    kinds.clear()
    return others


def _with_tuples(found: list[Any]) -> list[Any]:
    """Add the tuples that something holds: those are ready."""
    tuples: dict[int, Any] = {}
    for start in range(0, len(found), AT_ONCE):
        held = gc.get_referents(*found[start : start + AT_ONCE])
        tuples |= {id(one): one for one in held if type(one) is tuple}
    found += tuples.values()
    return found


def let_go_of_older_objects() -> None:
    """Hold the objects from before the training no more: the program may drop them."""
    _older.clear()
