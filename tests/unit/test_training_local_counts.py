"""Local variables that count, and what a function makes of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from slurm_resilience.training.guards.code.local_counts import LocalCounts, uses


def power(n: int, x: Any) -> Any:
    return (x.loss(n) * 0.9**n).backward()


def root(n: int, x: Any) -> Any:
    return x * (1 + n) ** -0.5


def part(n: int, x: Any) -> Any:
    return min(1.0, n / x.warmup(2))


def part_left(n: int, x: Any) -> Any:
    return 1 - n * 3 / x


def log(n: int, x: Any) -> Any:
    if n % 10 == 0 and n > 3:
        print(n, f"{n}", x / n, n // 3, x[n])
    return n


def itself(n: float, x: Any) -> float:
    n = n * 0.9 + 1
    return x + n


def of_object(one: Any, x: Any) -> Any:
    one.n = one.n * 0.9
    return x


def of_object_at_once(one: Any, x: Any) -> Any:
    one.n *= 0.9
    return x


def of_another(one: Any, x: Any) -> Any:
    x.m = one.n * 0.9
    x.m *= one.n
    x.loss = 0.5 ** (one.n + 1)


def inner(n: int, x: Any) -> Callable[[], float]:
    return lambda: 0.9**n


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (power, {"computed"}),
        (root, {"computed"}),
        (part, {"computed"}),
        (part_left, {"computed"}),
        (log, set()),
        (itself, {"itself"}),
        (of_object, {"itself"}),
        (of_object_at_once, {"itself"}),
        (of_another, {"computed"}),
        (inner, set()),
    ],
)
def test_what_is_made_of_a_variable(function: Callable[..., Any], found: set[str]) -> None:
    assert uses(function.__code__, "n") == found


class Loop:
    """A training's function; its frame is none of the library's."""

    def __init__(self) -> None:
        self.counts, self.told = LocalCounts(), []

    def look(self, *, asked_step: bool = False) -> None:
        self.told.append(self.counts.counted(asked_step=asked_step))


def test_it_is_told_once_when_three_looks_agree() -> None:
    loop, n, tau, even, other = Loop(), 0, 1.0, 0, 0
    for _ in range(6):
        n, even, tau = n + 1, even + 2, tau * 0.9
        other = n * n
        assert 0.9**n + even + other**2
        loop.look()
    assert loop.told == [(), (), ("n", "tau"), (), (), ()]


def test_a_loop_that_asks_for_its_step_is_not_told() -> None:
    loop = Loop()
    for n in range(6):
        assert 0.9**n
        loop.look(asked_step=n > 0)
    assert not any(loop.told)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_frame_keeps_nothing_of_what_was_looked_at(is_asked: bool) -> None:
    """But what the program has asked for."""

    class Thing:
        pass

    loop, thing = Loop(), Thing()
    gone = weakref.ref(thing)
    everything = locals() if is_asked else {}
    loop.look()
    del thing
    assert (gone() is None) == (not is_asked)
    assert ("loop" in everything) == is_asked
