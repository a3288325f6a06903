"""Random states are read in full whenever something was drawn, however it was drawn."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.training.state import rng

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


def _next() -> tuple[object, ...]:
    return (np.random.randn(), np.random.randn(), random.gauss(0, 1), float(torch.rand(())))


@given(st.lists(st.lists(st.sampled_from(DRAWS), max_size=3), min_size=1, max_size=5))
def test_what_was_read_last_comes_back(steps: list[list[Callable[[], object]]]) -> None:
    states = rng.read()
    for draws in steps:
        for draw in draws:
            draw()
        states = rng.read()
    wanted = _next()
    rng.write(states)
    assert _next() == wanted


def test_what_numpy_holds_back_comes_back_though_its_words_are_the_same() -> None:
    np.random.seed(7)
    np.random.randn(2)
    rng.read()
    np.random.rand()
    rng.read()
    for _ in range(2):
        np.random.seed(7)
        np.random.randn(2)
        rng.read()
    np.random.seed(7)
    np.random.randn()
    states = rng.read()
    wanted = _next()
    rng.write(states)
    assert _next() == wanted


def test_a_generator_that_is_not_used_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(1))
    read, calls = np.random.get_state, []
    monkeypatch.setattr(np.random, "get_state", lambda **k: calls.append(k) or read(**k))
    try:
        for _ in range(3):
            rng.read()
        assert len(calls) == 1
        np.random.rand()
        for _ in range(3):
            rng.read()
        assert len(calls) == 4
    finally:
        np.random.set_bit_generator(before)


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
