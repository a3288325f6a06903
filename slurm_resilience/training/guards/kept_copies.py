"""See copies of the parameters that go along with them, as averages do, and are not tracked: a
module made by `copy.deepcopy`, or a plain list, tuple or dict of tensors.

A copy goes along if it has the parameters' shapes, lies close to them, and is written to. One that
is only read (weights to compare with) is none, nor are gradients that a program adds up itself.

And see copies that the training function makes of the weights as it finds them: a reference, a
teacher. After a fault it finds others.

Copies that are made in the middle of a training are seen, too: modules when they are copied, others
when it is looked again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resilience.training.compat import has_memory, versions
from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.guards.kept_objects import held
from slurm_resilience.training.state import adapters
from slurm_resilience.training.state.describe import local_shard

LOOKED_AT = 4096
"""Numbers of a parameter that are compared."""
CLOSE_SHARE = 0.5
"""A copy is no further from the parameters than this part of their own size."""
MOST = 64
"""Copies made in the middle of a training that are looked at: a program may keep those of many
steps."""
MOST_COPIED = 16
"""Modules copied in the middle of a training that are looked at in one world: a program may copy
its model in each step, and to compare one takes a part of a step."""
CONTENT_LOOKS = 3
"""Looks at what a copy holds, from the time at which it was found: torch does not count a write
through `.data`, as many a moving average is written. Later only what it counts is seen."""
LIVES_ON = 3
"""Looks at a module that was copied in the middle of a training, one a step: one that is only
validated with is gone by then."""


def _never() -> bool:
    return False


class _Copy(NamedTuple):
    kind: str
    first: weakref.ref[torch.Tensor]
    """Its first tensor: a copy that the program lets go of is not kept."""
    version: int
    ids: frozenset[int]
    """Its tensors' ids."""
    content: int
    """Checksum of some numbers of the first."""
    looks: int = CONTENT_LOOKS
    """Those that are left of `CONTENT_LOOKS`."""
    is_of_now: Callable[[], bool] = _never
    """Tells whether it holds what the parameters are now: it may be kept to be saved."""


class _Late(NamedTuple):
    copy: _Copy
    looks: int


class _Like(NamedTuple):
    kind: type
    """Type of the module."""
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


class KeptCopies:
    """Those of this process that were there when it was looked."""

    def __init__(self) -> None:
        self._found: list[_Copy] = []
        self._late: list[_Late] = []
        """Modules that were copied in the middle of a training."""
        self._before: set[int] = set()
        """Ids of the first tensors of copies that were there before the weights were healed."""
        self._tracked: list[Any] = []
        self._former: set[int] = set()
        """Ids of what was tracked in the world before: something may hold it yet."""
        self.told: set[int] = set()
        """Ids of the tensors of copies that were told of when they were made: what the program does
        with them is told by that line."""
        self._copied: list[weakref.ref[nn.Module]] = []
        """Modules copied since the last look, of the kinds of those that are tracked."""
        self._copied_kinds: frozenset[type] = frozenset()
        self._copies_left = MOST_COPIED

    def begin(
        self, everything: Iterable[Any], modules: Iterable[nn.Module], tracked: Iterable[Any]
    ) -> None:
        """Begin a world, with the weights as `s.track` leaves them.

        Args:
            everything: objects that may be copies already; none, once these weights have been
                trained: a copy of them cannot be older.
            modules: those that are tracked.
            tracked: all objects that are; what they hold is no copy to tell of.
        """
        self._former = self.known()
        self._tracked, self._copied, self._copies_left = list(tracked), [], MOST_COPIED
        found = _copies(everything, modules, self.known(), _is_equal)
        self._before = {id(tensors[0]) for _, tensors, _ in found}

    def made(
        self,
        everything: Iterable[Any],
        modules: Iterable[nn.Module],
        others: Iterable[nn.Module] = (),
    ) -> tuple[str, ...]:
        """Return the kinds of copies that were made since a world began, with weights that have not
        changed since.

        Args:
            everything: objects of this process.
            modules: those that are tracked.
            others: copies that are told of otherwise.
        """
        kinds: dict[int, str] = {}  # as in `look`
        known = self.known(others) | self._former
        for thing, tensors, _ in _copies(everything, modules, known, _is_equal):
            # The model of the last world, which something may hold yet, is sharded as this one is.
            if id(tensors[0]) not in self._before and not isinstance(tensors[0], DTensor):
                kinds.setdefault(id(tensors[0]), type(thing).__name__)
                self.told.update(map(id, tensors))
        return tuple(dict.fromkeys(kinds.values()))

    def look(
        self,
        everything: Iterable[Any],
        modules: Iterable[nn.Module],
        others: Iterable[nn.Module] = (),
    ) -> None:
        """Find them.

        Args:
            everything: objects of this process.
            modules: those that are tracked.
            others: copies that are told of otherwise.
        """
        kept: dict[int, _Copy] = {}  # by the first tensor: a module has a table of its own as well
        for thing, tensors, _ in _copies(everything, modules, self.known(others), _is_close):
            kept.setdefault(id(tensors[0]), _copy(thing, tensors))
        self._found = list(kept.values())

    def look_again(
        self,
        everything: Iterable[Any],
        modules: Iterable[nn.Module],
        others: Iterable[nn.Module] = (),
    ) -> None:
        """Find plain lists, tuples, dicts and modules that were made meanwhile.

        Args:
            everything: as in `look`.
            modules: the same.
            others: the same.
        """
        known = {id(first) for one in self._found if (first := one.first()) is not None}
        known |= {id(first) for one in self._late if (first := one.copy.first()) is not None}
        for thing, tensors, like in _copies(everything, modules, self.known(others), _is_close):
            if len(self._found) >= MOST:
                break
            # A parameter in a list or a dict is a module's, which is looked at itself.
            is_modules = isinstance(tensors[0], nn.Parameter) and not isinstance(thing, nn.Module)
            if id(tensors[0]) not in known and not is_modules:
                known.add(id(tensors[0]))
                is_of_now = partial(_holds_now, [weakref.ref(one) for one in tensors], like)
                self._found.append(_copy(thing, tensors)._replace(is_of_now=is_of_now))

    def expect(self, modules: Iterable[nn.Module]) -> None:
        """Note copies from now on of the kinds of these modules: those that are tracked."""
        self._copied_kinds = frozenset(type(adapters.unwrap(one)) for one in modules)

    def note(self, copied: nn.Module) -> bool:
        """Note that a module was copied. Returns whether it will be looked at."""
        noted = type(copied) in self._copied_kinds and len(self._copied) < self._copies_left
        if noted:
            self._copied.append(weakref.ref(copied))
        return noted

    def look_at_copied(
        self, modules: Iterable[nn.Module], others: Iterable[nn.Module] = ()
    ) -> None:
        """Begin to look at the modules that were copied since the last look.

        Args:
            modules: as in `look`.
            others: the same.
        """
        if not self._copied:
            return
        made = [one for noted in self._copied if (one := noted()) is not None]
        self._copied = []
        self._copies_left -= len(made)
        found = _copies(made, modules, self.known(others), _is_close)
        self._late += [_Late(_copy(thing, tensors), 0) for thing, tensors, _ in found]

    def known(self, others: Iterable[nn.Module] = ()) -> set[int]:
        """Return the ids of what is tracked, and of copies that are told of otherwise."""
        things = (*self._tracked, *others)
        return {id(one) for thing in things for one in (thing, *held(thing))} | self.told

    def tensors(self) -> frozenset[int]:
        """Return the ids of the tensors of all that are looked at."""
        return frozenset().union(*(copy.ids for copy in self._found))

    @property
    def is_over(self) -> bool:
        """True where none is looked at any more."""
        return not self._found and not self._late and not self._copied

    def written(self) -> tuple[str, ...]:
        """Return the kinds of those that were written to since; each is told once."""
        if not self._found and not self._late:
            return ()
        late, used = self._late, [one.copy for one in self._late if _is_written(one.copy)]
        self._late = [one for one in late if not _is_written(one.copy)]
        found, self._found = self._found, []
        for copy in found:
            looked = copy._replace(looks=max(0, copy.looks - 1))
            if not _is_written(copy):
                self._found += [looked] if copy.first() is not None else []
            elif copy.is_of_now():
                self._found.append(looked._replace(version=_version(copy), looks=0))
            else:
                used.append(copy)
        return tuple(dict.fromkeys(copy.kind for copy in used))

    def living_on(self) -> tuple[str, ...]:
        """Return the kinds of modules that were copied in the middle of a training, are there some
        steps later, and were not written to; each is told once."""
        if not self._late:
            return ()
        alive = [
            one._replace(looks=one.looks + 1) for one in self._late if one.copy.first() is not None
        ]
        self._late = [one for one in alive if one.looks < LIVES_ON]
        return tuple(dict.fromkeys(one.copy.kind for one in alive if one.looks >= LIVES_ON))


def _copy(thing: Any, tensors: Sequence[torch.Tensor]) -> _Copy:
    ids = frozenset(map(id, tensors))
    first = tensors[0]
    return _Copy(type(thing).__name__, weakref.ref(first), _writes(first), ids, _content(first))


def _content(one: torch.Tensor) -> int:
    return content_digest(_some(one.detach()))


def _writes(one: torch.Tensor) -> int:
    """Return a number that changes when a tensor is written to. torch does not count what its
    foreach functions do to a sharded one."""
    return content_digest(local_shard(one)) if isinstance(one, DTensor) else versions([one])[0]


def _version(copy: _Copy) -> int:
    first = copy.first()
    return copy.version if first is None else _writes(first)


def _is_written(copy: _Copy) -> bool:
    first = copy.first()
    is_changed = copy.looks > 0 and first is not None and _content(first) != copy.content
    return is_changed or _version(copy) != copy.version


def _holds_now(tensors: Sequence[weakref.ref[torch.Tensor]], like: _Like) -> bool:
    alive = [one for ref in tensors if (one := ref()) is not None]
    return len(alive) == len(tensors) and _is_equal(alive, like)


def _copies(
    everything: Iterable[Any],
    modules: Iterable[nn.Module],
    known: set[int],
    fits: Callable[[Sequence[torch.Tensor], _Like], bool],
) -> Iterator[tuple[Any, Sequence[torch.Tensor], _Like]]:
    """Yield what has the parameters' shapes, and fits, with its tensors and what it is like."""
    likes = [like for module in modules for like in _likes(adapters.unwrap(module))]
    kinds = {like.kind for like in likes}
    sizes = {len(like.parameters) for like in likes}
    known = known | {id(one) for like in likes for p in like.parameters for one in (p, p.grad)}
    for thing in everything if likes else ():
        kind = type(thing)
        if kind is list or kind is tuple:
            if len(thing) not in sizes:
                continue
        elif kind is not dict and kind not in kinds:
            continue
        for like in likes:
            tensors = _tensors(thing, like)
            alike = len(tensors) == len(like.parameters) and _have_shapes(tensors, like, known)
            if alike and fits(tensors, like):
                yield thing, tensors, like
                break


def _likes(module: nn.Module) -> Iterator[_Like]:
    """Yield what copies may be like: all parameters, or those that train. (One alone is like too
    much else.)"""
    named = dict(module.named_parameters())
    trained = {name: one for name, one in named.items() if one.requires_grad}
    for each in (named, trained) if len(trained) < len(named) else (named,):
        if len(each) > 1 and all(map(_is_plain, each.values())):
            yield _Like(type(module), tuple(each), tuple(each.values()))


def _tensors(thing: Any, like: _Like) -> Sequence[Any]:
    """Return what may be the copies, in the parameters' order."""
    if isinstance(thing, dict):
        return [thing.get(name) for name in like.names] if like.names[0] in thing else ()
    if isinstance(thing, nn.Module):
        named = dict(thing.named_parameters())
        return [named.get(name) for name in like.names]
    return thing if isinstance(thing, list | tuple) else ()


def _have_shapes(tensors: Sequence[Any], like: _Like, known: set[int]) -> bool:
    for one, parameter in zip(tensors, like.parameters, strict=True):
        if not isinstance(one, torch.Tensor) or id(one) in known or not _is_plain(one):
            return False
        here, there = local_shard(one), local_shard(parameter)
        other = one.shape != parameter.shape or here.shape != there.shape
        if other or one.device != parameter.device or not one.is_floating_point():
            return False
        if here.data_ptr() == there.data_ptr():
            return False
    return True


@torch.no_grad()
def _is_close(tensors: Sequence[torch.Tensor], like: _Like) -> bool:
    apart = size = 0.0
    for one, parameter in zip(tensors, like.parameters, strict=True):
        here = _some(parameter).double()
        apart += float((_some(one).double() - here).square().sum())
        size += float(here.square().sum())
    return apart <= CLOSE_SHARE**2 * size


@torch.no_grad()
def _is_equal(tensors: Sequence[torch.Tensor], like: _Like) -> bool:
    """Tell whether these are the very parameters, perhaps in another precision."""
    return all(
        torch.equal(_some(parameter).to(one.dtype), _some(one))
        for one, parameter in zip(tensors, like.parameters, strict=True)
    )


def _some(one: torch.Tensor) -> torch.Tensor:
    """Return the numbers that are compared: of a sharded one those of this rank, so that no
    collective is needed."""
    return local_shard(one).flatten()[:LOOKED_AT]


def _is_plain(one: torch.Tensor) -> bool:
    return not nn.parameter.is_lazy(one) and not one.is_meta and has_memory(one)
