"""Collections of garbage leave out what was there before a training, and nothing that it makes."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from slurm_resilience.training.garbage import (
    all_objects,
    let_go_of_older_objects,
    newer_objects,
    older_objects_left_out,
)


class InCycle:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def dropped() -> weakref.ref[InCycle]:
    return weakref.ref(InCycle())


def test_what_was_there_is_left_out_until_the_end() -> None:
    # Else it may be collected by chance before the block.
    gc.disable()
    try:
        older = dropped()
        with older_objects_left_out():
            newer = dropped()
            gc.collect()
            assert newer() is None
            assert older() is not None
        gc.collect()
        assert older() is None
    finally:
        gc.enable()


def test_it_ends_with_an_exception_too() -> None:
    with pytest.raises(KeyError), older_objects_left_out():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_the_program_has_left_out_itself_stays_so() -> None:
    gc.freeze()
    with older_objects_left_out():
        pass
    assert gc.get_freeze_count() > 0


def test_what_was_there_is_listed_until_it_is_let_go_of() -> None:
    older, gone = InCycle(), list[int]()
    weakref.finalize(older, gone.append, 1)
    with older_objects_left_out():
        newer = InCycle()
        assert listed() == 2
        older.itself = newer
        del older
        assert not gone
        let_go_of_older_objects()
        gc.collect()
        assert gone
        assert listed() == 1


def listed() -> int:
    """Count them without holding one."""
    return sum(type(one) is InCycle for one in all_objects())


@pytest.mark.parametrize("older", [False, True])
def test_a_tuple_that_another_thread_makes_is_left_alone(older: bool) -> None:
    """It was referred to when it was ready: a SystemError in that thread, the mesh's for one."""
    begun, goes_on, made = threading.Event(), threading.Event(), list[tuple[int, ...]]()

    def numbers() -> Iterator[int]:
        yield 1
        begun.set()
        assert goes_on.wait(30)
        yield 2

    thread = threading.Thread(target=lambda: made.append(tuple(numbers())))
    thread.start()
    assert begun.wait(30)
    if older:
        with older_objects_left_out():
            goes_on.set()
            thread.join()
    else:
        found = all_objects()
        goes_on.set()
        thread.join()
        assert found
    assert made == [(1, 2)]


def test_no_other_thread_meets_a_tuple_of_its_own_that_is_held() -> None:
    """Between any two operations of a look through all objects another thread may run."""
    begun, goes_on, made = threading.Event(), threading.Event(), list[tuple[object, ...]]()
    first, place, seen = InCycle(), list[int](), set[int]()

    def items() -> Iterator[object]:
        yield first
        place.extend(id(one) for one in gc.get_referrers(first) if type(one) is tuple)
        gc.collect()  # it is among the last that are listed now
        begun.set()
        assert goes_on.wait(60)
        yield 2

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        seen.add(ctypes.c_ssize_t.from_address(place[0]).value)
        frame.f_trace_opcodes = frame.f_code.co_name == "_listed"
        return traced if frame.f_trace_opcodes else None

    thread = threading.Thread(target=lambda: made.append(tuple(items())))
    thread.start()
    assert begun.wait(30)
    assert len(place) == 1
    sys.settrace(traced)
    try:
        newer_objects()
    finally:
        sys.settrace(None)
        goes_on.set()
        thread.join()
    assert made == [(first, 2)]
    assert seen == {1}


def test_tuples_that_are_held_are_listed() -> None:
    mine = InCycle()
    mine.itself = ("held", mine)  # type: ignore[assignment]
    assert any(one is mine.itself for one in all_objects())
