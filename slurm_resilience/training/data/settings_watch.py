"""See a dataset that the program changes while its batches are read ahead: a curriculum, a switch
for augmentation. Which batches see the change is left to chance."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

DEEP = 4
"""Datasets within datasets that are looked into."""
MOST = 64
"""Methods of a class that are looked through; of one with more nothing is known."""
_MISSING = object()
_PLAIN = (bool, int, float, str, type(None))

CHANGED = (
    "{names} of the dataset (or of its collate_fn) changes while batches are read: they are read "
    "ahead, in a thread, so which of them see it is left to chance, and another chance after a "
    "fault. Give each stage a dataset of its own, in a loader with its own name=; or say "
    "prefetch_length=0, and set it from s.step, before the loop too"
)


class _Setting(NamedTuple):
    name: str
    held: dict[str, Any]
    """Attributes of the object that has it."""
    default: Any
    """The class's."""
    before: Any

    def has_changed(self) -> bool:
        now = self.held.get(self.name, self.default)
        # An array has no truth value; and it is no switch, but something that was opened late.
        return type(now) in _PLAIN and now is not self.before and now != self.before


class SettingsWatch:
    """Numbers, words and switches from which samples follow: attributes that reading a sample asks
    for, and does not set itself.

    Args:
        source: a dataset that is asked by index.
        collate: makes a batch of samples.
    """

    def __init__(self, source: Any, collate: Any) -> None:
        self._settings = [
            *(one for part in _datasets(source, DEEP) for one in _found(part, "__getitem__")),
            *_found(getattr(collate, "__self__", collate), getattr(collate, "__name__", "")),
        ]

    def changed(self) -> str:
        """Return the names of those that are others than when this was made; empty: none."""
        return ", ".join(one.name for one in self._settings if one.has_changed())


def _datasets(source: Any, deep: int) -> Iterator[Any]:
    yield source
    if deep:
        held = getattr(source, "__dict__", {})
        several = held.get("datasets")
        # What else has such a name may be an array, or a table that takes hours to go through.
        for part in (held.get("dataset"), *(several if isinstance(several, list | tuple) else ())):
            if part is not None:
                yield from _datasets(part, deep - 1)


def _found(thing: Any, entry: str) -> list[_Setting]:
    """Return the settings of an object.

    Args:
        thing: any object.
        entry: the method that is called, beside those with special names.
    """
    held = getattr(thing, "__dict__", None)
    if type(held) is not dict or isinstance(thing, type):
        return []
    settings = []
    for name in _asked(type(thing), {entry, "__getitem__", "__getitems__", "__call__"}):
        default = inspect.getattr_static(type(thing), name, _MISSING)
        if type(value := held.get(name, default)) in _PLAIN:
            settings.append(_Setting(name, held, default, value))
    return settings


def _asked(kind: type, entries: set[str]) -> list[str]:
    """Return the attributes that methods of a class ask for, and do not set. Pure."""
    asked, is_set, todo, methods = set[str](), set[str](), list(entries), 0
    while todo and methods <= MOST:
        if (name := todo.pop()) in asked:
            continue
        asked.add(name)
        method = inspect.getattr_static(kind, name, None)
        code = getattr(getattr(method, "fget", method), "__code__", None)
        if isinstance(code, CodeType) and code.co_argcount:
            methods += 1
            for one, stored in _attributes(code, code.co_varnames[0]):
                if stored:
                    is_set.add(one)
                else:
                    todo.append(one)
    return sorted(asked - is_set) if methods <= MOST else []


def _attributes(code: CodeType, me: str) -> Iterator[tuple[str, bool]]:
    """Yield the attributes that a method asks of its own object, and those that it sets of any."""
    owner: Any = None
    for one in dis.get_instructions(code):
        if one.opname == "STORE_ATTR":
            yield one.argval, True
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and owner == me:
            yield one.argval, False
        loads = one.opname.startswith("LOAD_")
        owner = one.argval[-1] if loads and isinstance(one.argval, tuple) else one.argval
        owner = owner if loads else None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _attributes(inner, me)
