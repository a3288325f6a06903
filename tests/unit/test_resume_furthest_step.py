"""An attempt got further than those before it, as far as the steps that were told can say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume.decide.classify import ObservedSteps
from slurm_resilience.resume.progress.furthest_step import FURTHER_SECONDS, FurthestStep
from slurm_resilience.resume.progress.step_report import StepLine

PACE_SECONDS = 0.5
"""Ranks send their newest step so often."""


def attempt(
    first: int, last: int, seconds: float, *before: ObservedSteps, begins: float = 10.0
) -> ObservedSteps:
    """The steps of a program that takes so long for each, and of which some are told."""
    furthest, sent = FurthestStep(before, 0.0), -PACE_SECONDS
    for number in range(first, last + 1):
        at = begins + (number - first) * seconds
        if at - sent >= PACE_SECONDS:
            sent = at
            furthest.hear(StepLine(0, number), at)
    return furthest.told()


@given(seconds=st.floats(0.002, 30.0), starts=st.lists(st.integers(0, 900), max_size=4))
def test_a_program_that_fails_at_one_step_gets_no_further(
    seconds: float, starts: list[int]
) -> None:
    before = [attempt(0, 1000, seconds)]
    assert before[0].got_further
    for start in starts:
        # Its first step was known already, unless so many follow each other in half a second.
        if start > before[0].furthest:
            continue
        told = attempt(start, 1000, seconds, *before)
        assert not told.got_further
        before.append(told)


@given(seconds=st.floats(0.01, 60.0), more=st.integers(1, 1000))
def test_a_program_that_goes_on_from_its_checkpoint_gets_further(seconds: float, more: int) -> None:
    first = attempt(0, 1000, seconds)
    told = attempt(900, 1000 + more, seconds, first)
    assert told.furthest <= 1000 + more
    slack = PACE_SECONDS + seconds
    if seconds * more >= FURTHER_SECONDS + 2 * slack:
        assert told.got_further


def moves(count: int, *before: ObservedSteps, epoch: int = 0) -> ObservedSteps:
    furthest = FurthestStep(before, 0.0)
    for number in range(1, count + 1):
        step = number % epoch if epoch else number
        line = StepLine(-1 if not epoch else 0, step, has_number=bool(epoch))
        furthest.hear(line, 10.0 * number)
    return furthest.told()


def test_a_file_that_moves_as_often_as_before_tells_of_no_progress() -> None:
    first = moves(20)
    assert first == ObservedSteps(-1, 20, True)
    assert not any(moves(n, first).got_further for n in (0, 1, 18, 20, 22))
    assert moves(5, first).got_further and moves(40, first).got_further
    assert moves(20, first, moves(5)).got_further, "only the attempt before counts"


def test_steps_that_begin_anew_in_each_epoch_say_only_how_often_it_moved() -> None:
    first = moves(2500, epoch=1000)
    assert (first.furthest, first.moved, first.got_further) == (-1, 2500, True)
    assert not moves(2510, first, epoch=1000).got_further
    assert moves(4100, first, epoch=1000).got_further


def test_one_that_heals_itself_goes_back_by_few_steps() -> None:
    furthest = FurthestStep((ObservedSteps(40, 40, True),), 0.0)
    for at, step in enumerate((41, 60, 58, 70)):
        furthest.hear(StepLine(0, step), 10.0 * at)
    assert furthest.told() == ObservedSteps(70, 4, True)


def test_numbers_count_where_a_file_is_watched_as_well() -> None:
    furthest = FurthestStep((ObservedSteps(40, 40, True),), 0.0)
    for at in range(1, 30):
        furthest.hear(StepLine(-1, at, has_number=False), 10.0 * at)
        furthest.hear(StepLine(0, at), 10.0 * at)
    assert furthest.told() == ObservedSteps(29, 29, False)


def test_nothing_told_is_nothing_known() -> None:
    furthest = FurthestStep((), 0.0)
    furthest.hear(StepLine(0, None), 1.0)
    assert furthest.told() == ObservedSteps()
