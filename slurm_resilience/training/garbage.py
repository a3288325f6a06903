"""Keep Python's collector of garbage from looking through torch at each recovery.

The worlds of FSDP that were left hang in reference cycles, so a collection has to follow them. With
torch loaded it took 0.25 s, in which the process stands still; without what was there before the
training it takes 0.02 s.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

_older: list[Any] = []
"""Objects that were there before the training. The collector does not list them meanwhile."""


@contextlib.contextmanager
def older_objects_left_out() -> Iterator[None]:
    """Have collections within this block leave out what was made before it.

    An object from before that the program drops is let go of all the same, unless a reference cycle
    holds it: then at the first collection after the block. Where the program has had objects left
    out itself (`gc.freeze`), these stay so for good.
    """
    is_ours = gc.get_freeze_count() == 0
    _older[:] = gc.get_objects()
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
    found = gc.get_objects()
    found += _older  # a list that is made before would be in it, and hold itself
    return found


def let_go_of_older_objects() -> None:
    """Hold the objects from before the training no more: the program may drop them."""
    _older.clear()
