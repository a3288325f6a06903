"""Random states go back to the mark, however they were drawn from, and are seldom read where
nothing draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.training.state import rng
from slurm_resilience.training.state.rng import CLOSELY, QUIET_MARKS, MarkedStates

DRAWS: tuple[Callable[[], object], ...] = (
    lambda: np.random.rand(3),
    # Draws two, and holds one back: the next call hands it out without touching the generator.
    lambda: np.random.randn(),
    lambda: np.random.seed(7),
    lambda: np.random.shuffle(np.arange(5)),
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.seed(7),
    lambda: [random.random() for _ in range(700)],
    lambda: torch.rand(2),
)
STEPS = st.lists(st.lists(st.sampled_from(DRAWS), max_size=3), min_size=1, max_size=5)


def _next() -> tuple[object, ...]:
    return (np.random.randn(), np.random.randn(), random.gauss(0, 1), float(torch.rand(())))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The libraries whose states are read, one after the other."""
    found: list[str] = []

    def noting(name: str, read: Callable[[], object]) -> Callable[[], object]:
        def note() -> object:
            found.append(name)
            return read()

        return note

    readers = {name: noting(name, read) for name, read in rng._READERS.items()}
    monkeypatch.setattr(rng, "_READERS", readers)
    yield found


@given(STEPS)
def test_what_was_read_last_comes_back(steps: list[list[Callable[[], object]]]) -> None:
    states = rng.read()
    for draws in steps:
        for draw in draws:
            draw()
        states = rng.read()
    wanted = _next()
    rng.write(states)
    assert _next() == wanted


@given(STEPS, st.integers(0, CLOSELY))
def test_the_last_mark_comes_back(steps: list[list[Callable[[], object]]], quiet: int) -> None:
    marked = MarkedStates()
    marked.begin()
    for draws in [*[[]] * quiet, *steps][:CLOSELY]:
        for draw in draws:
            draw()
        marked.mark()
    wanted = _next()
    for _ in range(2):
        marked.rollback()
        assert _next() == wanted


def test_what_was_drawn_from_once_is_read_at_each_mark(reads: list[str]) -> None:
    marked = MarkedStates()
    marked.begin()
    random.random()
    for _ in range(CLOSELY):
        marked.mark()
    del reads[:]
    for number in range(1, 3 * QUIET_MARKS):
        if number % 3 == 0:
            random.random()
        marked.mark()
    wanted = random.random()
    marked.rollback()
    assert random.random() == wanted
    assert reads.count("random") == 3 * QUIET_MARKS - 1
    assert reads.count("torch") == 3 * QUIET_MARKS - 1
    assert reads.count("numpy") <= 4


def test_a_single_draw_of_torch_is_never_repeated() -> None:
    """A sampler draws the order of an epoch, once, however many steps came before."""
    marked = MarkedStates()
    marked.begin()
    for _ in range(CLOSELY + QUIET_MARKS // 2):
        marked.mark()
    torch.rand(1)
    marked.mark()
    wanted = torch.rand(1)
    marked.rollback()
    assert torch.equal(torch.rand(1), wanted)


def test_a_first_draw_is_seen_at_the_next_look(reads: list[str]) -> None:
    marked = MarkedStates()
    marked.begin()
    for _ in range(CLOSELY):
        marked.mark()
    np.random.rand()
    for _ in range(QUIET_MARKS):
        marked.mark()
    del reads[:]
    np.random.rand()
    marked.mark()
    assert reads == ["torch", "numpy"]
    wanted = np.random.rand()
    marked.rollback()
    assert np.random.rand() == wanted


def test_ranks_that_draw_alike_do_so_after_a_fault_before_the_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = None
    for steps_since in (0, 1, 3):  # ranks in different places when the fault comes
        random.seed(1)
        marked = MarkedStates()
        marked.begin()
        for _ in range(CLOSELY + 1):
            marked.mark()
        for _ in range(steps_since):
            random.random()
            marked.mark()
        random.random()
        marked.rollback()
        wanted = wanted or random.random()
        random.seed(1)
        assert random.random() == wanted
    assert "the first random numbers of random were drawn" in caplog.text
    assert "torch" not in caplog.text


def test_another_state_after_a_healing_is_no_draw(reads: list[str]) -> None:
    marked = MarkedStates()
    marked.begin()
    rng.seed(3)
    marked.begin()
    for _ in range(CLOSELY):
        marked.mark()
    del reads[:]
    marked.mark()
    assert reads == ["torch"]


def test_another_generator_is_read_too() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        states = rng.read()
        wanted = np.random.rand(4).tolist()
        rng.write(states)
        assert np.random.rand(4).tolist() == wanted
    finally:
        np.random.set_bit_generator(before)
