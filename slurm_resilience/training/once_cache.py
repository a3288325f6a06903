"""Keep what a block built the first time, for when it is entered again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

log = logging.getLogger("sres.training")


class OnceCache:
    """The results of functions, by each function's place in the program."""

    def __init__(
        self,
        entry: Callable[[], int] = lambda: 0,
        refuse: Callable[..., None] = lambda built, build, args, collectives: None,
        collectives: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            entry: tells how often the block was entered.
            refuse: raises where what was built, by a function and its arguments, cannot be kept, or
                by so many collectives.
            collectives: tells how many this process has begun.
        """
        self._entry = entry
        self._refuse = refuse
        self._collectives = collectives
        self._kept: dict[Hashable, Any] = {}
        self._asked: dict[Hashable, tuple[int, Hashable]] = {}
        """By key: the last entry of the block in which it was asked for, and with which values."""
        self._told: set[Hashable] = set()

    def once(self, build: Callable[..., Any], *args: Any) -> Any:
        """Call it the first time; afterwards give what it gave.

        Args:
            build: a function; the same one, or one made anew by the same code, is known again.
            args: its arguments; others count as another thing to build.
        """
        key = (which(build), _known_again(args))
        self._tell_other_values(key, build)
        if key not in self._kept:
            begun = self._collectives()
            built = build(*args)
            self._refuse(built, build, args, self._collectives() - begun)
            self._kept[key] = built
        return self._kept[key]

    def values(self) -> list[Any]:
        """Return all that was built."""
        return list(self._kept.values())

    def _tell_other_values(self, key: Hashable, build: Callable[..., Any]) -> None:
        """Warn where two calls in one entry of the block are taken for the same, and may not be:
        the second is given what the first has built."""
        now = (self._entry(), _values_of(build))
        before = self._asked.get(key, now)
        self._asked[key] = now
        if before[0] == now[0] and before[1] != now[1] and key not in self._told:
            self._told.add(key)
            log.warning(
                "s.once(%s): the same function was called before with other variables, and what it "
                "built then is given again; give it what differs as an argument",
                getattr(build, "__qualname__", build),
            )


def which(build: Callable[..., Any]) -> Hashable:
    """Return a key that is the same for a function that the block makes anew whenever it is entered
    (a lambda), and another for every other function. Pure: its place in the program and what it
    was bound to.

    Args:
        build: anything that can be called.
    """
    if isinstance(build, functools.partial):
        return (which(build.func), _known_again(build.args), _words(build.keywords))
    function = getattr(build, "__func__", build)
    code = getattr(function, "__code__", None)
    name = getattr(build, "__qualname__", None)
    if code is None:
        # A class, or a function of C; else an object, which is known by itself alone.
        return (getattr(build, "__module__", None), name or _known_again(build))
    # The table of lines tells two lambdas of one line apart: it knows their columns.
    place = (function.__module__, name, code.co_filename, code, code.co_linetable)
    defaults = (_known_again(function.__defaults__), _words(function.__kwdefaults__ or {}))
    return (*place, *defaults, _owner(build))


def _values_of(build: Callable[..., Any]) -> Hashable:
    """Return what a function takes from around it: a method's object, a closure's variables."""
    if isinstance(build, functools.partial):
        return _values_of(build.func)
    function = getattr(build, "__func__", build)
    cells = getattr(function, "__closure__", None) or ()
    held = [getattr(build, "__self__", None)]
    for cell in cells:
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append(None)  # not filled yet
    plain = (bool, int, float, str, bytes, type(None))
    return tuple(one if isinstance(one, plain) else id(one) for one in held)


def _owner(build: Callable[..., Any]) -> Hashable:
    """Return what a method is bound to, where that is a class or a value. Two objects
    without a value of their own cannot be told from one that the block made anew."""
    owner = getattr(build, "__self__", None)
    if owner is None or isinstance(owner, type):
        return owner
    by_itself: Any = object.__eq__
    return None if type(owner).__eq__ is by_itself else _known_again(owner)


def _words(values: dict[str, Any]) -> Hashable:
    return _known_again(tuple(sorted(values.items())))


def _known_again(value: Any) -> Hashable:
    """Something that is equal when this value comes again."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    found: Hashable = value
    return found
