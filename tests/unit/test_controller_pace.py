"""Rounds of a large cluster are further apart, and those of a small one are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.controller.pace import LIGHT_SECONDS, TICK_SECONDS, RoundCause, pause_before

COSTS = st.floats(0, 60)
INTERVALS = st.floats(0.1, 60)


@pytest.mark.parametrize(
    ("cause", "seconds"),
    [(RoundCause.QUIET, 2.0), (RoundCause.BUSY, TICK_SECONDS), (RoundCause.WOKEN, 0.0)],
)
def test_a_small_cluster_is_looked_at_as_often_as_ever(cause: RoundCause, seconds: float) -> None:
    assert pause_before(cause, 2.0, 0.04) == seconds


@given(st.sampled_from(RoundCause), INTERVALS, st.floats(LIGHT_SECONDS, 60, exclude_min=True))
def test_rounds_take_no_more_than_their_share(
    cause: RoundCause, interval: float, cost: float
) -> None:
    share, most = cause.value
    pause = pause_before(cause, interval, cost)
    assert cost <= share * pause * 1.001 or pause >= most


@given(st.sampled_from(RoundCause), INTERVALS, COSTS)
def test_no_cost_keeps_sresctld_from_looking(
    cause: RoundCause, interval: float, cost: float
) -> None:
    _, most = cause.value
    assert pause_before(cause, interval, cost) <= max(most, interval)


@given(INTERVALS, COSTS)
def test_the_more_urgent_the_sooner(interval: float, cost: float) -> None:
    quiet, busy, woken = (pause_before(cause, interval, cost) for cause in RoundCause)
    assert woken <= busy <= quiet
