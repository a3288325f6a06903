"""See process groups, and what holds one, in global variables of the program that are made once
(`if GROUP is None`), or in a cache of functools. After a fault the ranks that live keep a group of
a world that has ended, and a replaced one waits alone where it is made."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slurm_resilience.errors import UsageError
from slurm_resilience.training.guards.code.program_locals import program_modules
from slurm_resilience.training.guards.kept_objects import is_programs_file

KINDS = (nn.parallel.DistributedDataParallel, dist.ProcessGroup, DeviceMesh)
INSTEAD = "Make it whenever the function is entered, by s.new_group(…), s.mesh() or s.ddp(…)"
MOST_ITEMS = 64
CACHE_DEEP = 3
"""Objects within objects of a cache: its table, a link, what a call returned."""
_CACHE = type(functools.lru_cache(lambda: None))
_BETWEEN = {"COMPARE_OP", "CONTAINS_OP", "COPY", "IS_OP", "LOAD_CONST", "TO_BOOL", "UNARY_NOT"}
"""Instructions between a variable and the jump that a look at it decides."""
_OF_WORLDS = {"attempt", "generation"}
"""Names in the session that change with the world."""


class _Kept(NamedTuple):
    name: str
    thing: Any


def kept(frame: FrameType | None) -> tuple[str, ...]:
    """Return the names of such variables of the program's modules.

    Args:
        frame: the caller's.
    """
    return tuple(sorted({f"{one.name} ({type(one.thing).__name__})" for one in _kept(frame)}))


def refuse_left(frame: FrameType | None, known: Collection[Any]) -> None:
    """Refuse those of a world that has ended: a process that is new makes another one, and waits
    there for the others.

    Args:
        frame: the caller's.
        known: the groups of this world.

    Raises:
        UsageError: there is one.
    """
    for name, thing in _kept(frame):
        if isinstance(thing, dist.ProcessGroup) and thing not in known:
            raise UsageError(
                f"{name} keeps a process group of a world that has ended, and a replaced rank "
                f"makes another one. {INSTEAD}"
            )


def _kept(frame: FrameType | None) -> Iterator[_Kept]:
    for names in _modules(frame):
        for name, value in list(names.items()):
            kind = type(value)
            if kind is _CACHE:
                if (thing := _cached(value)) is not None:
                    yield _Kept(name, thing)
            elif (thing := _group_in(value)) is not None:
                if is_made_once(_codes(names), name, "GLOBAL"):
                    yield _Kept(name, thing)
            elif issubclass(kind, type) and value.__module__ == names.get("__name__"):
                yield from _of_class(value)


def _of_class(kind: type) -> Iterator[_Kept]:
    for name, value in list(vars(kind).items()):
        if (thing := _group_in(value)) is None:
            continue
        if is_made_once(_codes(vars(kind)), name, "ATTR"):
            yield _Kept(f"{kind.__name__}.{name}", thing)


def _modules(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Yield the names of the modules that have called, and of the program's own ones in them."""
    seen = set[int]()
    for names in list(program_modules(frame)):
        inner: list[Mapping[str, Any]] = [names]
        for value in list(names.values()):
            if type(value) is ModuleType:
                inner.append(vars(value))
            elif type(value) is FunctionType:
                inner.append(value.__globals__)
            elif type(value) is _CACHE:
                inner.append(getattr(value.__wrapped__, "__globals__", {}))
        for each in inner:
            if id(each) not in seen and (each is names or is_programs_file(each.get("__file__"))):
                seen.add(id(each))
                yield each


def _group_in(value: Any) -> Any:
    """Return the group, or what holds one; None: it is none, and no list or dict of such."""
    items: Any = (value,)
    if type(value) in (list, tuple):
        items = value
    elif type(value) is dict:
        items = value.values()
    some = list(items) if len(items) <= MOST_ITEMS else []
    return next((one for one in some if issubclass(type(one), KINDS)), None)


def _cached(cache: Any) -> Any:
    """Return a group that a cache of functools keeps, or None."""
    if not cache.cache_info().currsize:
        return None
    found = [cache]
    for _ in range(CACHE_DEEP):
        inner = [one for one in gc.get_referents(*found) if type(one) is not FunctionType]
        for one in inner:
            if issubclass(type(one), KINDS):
                return one
        found = [one for one in inner if type(one) is dict or "lru" in type(one).__name__]
        if not found:
            break
    return None


def _codes(names: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the code of the functions, and of those within."""
    for value in list(names.values()):
        function = inspect.unwrap(value) if callable(value) else value
        function = getattr(function, "__func__", function)  # of a class's method
        if type(function) is FunctionType:
            yield from _within(function.__code__)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if type(one) is CodeType:
            yield from _within(one)


def is_made_once(codes: Iterable[CodeType], name: str, kind: str) -> bool:
    """Tell whether functions give a variable its value (or an item) only where they have looked
    that it has none, and not by the world. Pure.

    Args:
        codes: of the functions.
        name: of the variable.
        kind: ``GLOBAL``, or ``ATTR`` of an object.
    """
    gives = [looked for code in codes for looked in _gives(code, name, kind)]
    return bool(gives) and all(gives)


def _gives(code: CodeType, name: str, kind: str) -> Iterator[bool]:
    """Yield, for each place that gives the variable a value, whether it was looked at before."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    looked = False
    for at, one in enumerate(instructions):
        if one.opname == "STORE_SUBSCR":
            gives = _last_loaded(instructions[:at]) == name
        else:
            gives = one.argval == name and one.opname == f"STORE_{kind}"
        if gives:
            yield looked and not _OF_WORLDS & set(code.co_names)
        if one.argval == name and one.opname == f"LOAD_{kind}":
            looked = looked or _decides(instructions[at + 1 :])


def _decides(following: list[dis.Instruction]) -> bool:
    """Tell whether a jump depends on what lies on top of the stack."""
    for one in following:
        if one.opname not in _BETWEEN:
            return "JUMP" in one.opname and "IF" in one.opname
    return False


def _last_loaded(before: list[dis.Instruction]) -> Any:
    """Return the global variable, or attribute, that was read last."""
    loads = [one for one in before if one.opname in ("LOAD_GLOBAL", "LOAD_ATTR")]
    return loads[-1].argval if loads else None
