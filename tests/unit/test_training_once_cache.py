"""An object built once is found again, and no other is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from slurm_resilience.training.once_cache import OnceCache, which


def block(built: OnceCache, size: int = 1) -> list[Any]:
    """Makes new function objects from the same code each time."""

    def nested() -> list[str]:
        return ["nested"]

    # fmt: off
    return [
        built.once(lambda: ["first"]),
        built.once(lambda: ["second"]),
        built.once(lambda: [0]), built.once(lambda: [0]),
        built.once(nested),
        built.once(functools.partial(lambda word: [word], "part")),
        built.once(functools.partial(lambda word: [word], word=["unhashable"])),
        built.once(lambda size=size: [size]),
        built.once(Sized(4).build), built.once(Sized(5).build),
        built.once(Plain().build),
        built.once(Sized.make), built.once(Larger.make),
        built.once(Sized, 6), built.once(list), built.once(dict),
    ]
    # fmt: on


@dataclass
class Sized:
    size: int

    def build(self) -> list[int]:
        return [self.size]

    @classmethod
    def make(cls) -> list[type]:
        return [cls]


class Larger(Sized):
    pass


class Plain:
    def build(self) -> list[str]:
        return ["plain"]


def test_a_block_that_is_entered_again_finds_what_it_built() -> None:
    built = OnceCache()
    first, second = block(built), block(built)
    assert [id(one) for one in second] == [id(one) for one in first]


def test_every_function_builds_its_own() -> None:
    built = OnceCache()
    first = block(built)
    assert len({id(one) for one in first}) == len(first)
    assert first[0] == ["first"]
    assert first[1] == ["second"]
    assert [first[8], first[9]] == [[4], [5]]
    assert block(built, 2)[7] == [2]


def test_functions_of_one_name_in_two_modules_are_two() -> None:
    one: dict[str, Any] = {"__name__": "one"}
    two: dict[str, Any] = {"__name__": "two"}
    for module in (one, two):
        exec("def build(): return [__name__]", module)
    built = OnceCache()
    assert [built.once(module["build"]) for module in (one, two)] == [["one"], ["two"]]


def test_arguments_count_also_when_they_cannot_be_hashed() -> None:
    built, made = OnceCache(), []

    def build(sizes: list[int]) -> int:
        made.append(sizes)
        return len(made)

    assert [built.once(build, sizes) for sizes in ([1], [2], [1])] == [1, 2, 1]


@pytest.mark.parametrize("build", [print, int, len, "word".upper, functools.lru_cache(len)])
def test_what_has_no_code_has_a_name(build: Callable[..., Any]) -> None:
    assert which(build) == which(build)
    hash(which(build))


def test_objects_that_are_called_are_known_by_themselves() -> None:
    class Maker:
        def __call__(self) -> list[int]:
            return []

    built, one, two = OnceCache(), Maker(), Maker()
    assert built.once(one) is built.once(one)
    assert built.once(one) is not built.once(two)


def test_two_that_are_taken_for_one_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The discriminator would be the generator, without a word."""
    entry = [0]
    built = OnceCache(lambda: entry[0])
    second = Plain()

    def maker(size: int) -> Callable[[], list[int]]:
        return lambda: [size]

    for _ in range(2):  # after a fault all values may be others
        entry[0] += 1
        first = Plain()
        built.once(first.build)
        built.once(first.build)
        built.once(maker(4))
        built.once(maker(4))
    assert caplog.text == ""
    built.once(second.build)
    built.once(second.build)
    assert caplog.text.count("s.once(Plain.build): the same function was called before") == 1
    assert built.once(maker(5)) == [4]
    assert caplog.text.count("give it what differs as an argument") == 2
