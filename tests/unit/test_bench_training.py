"""The figures of `scripts/bench training`: from the ranks' lines to seconds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FILE = Path(__file__).parents[2] / "scripts" / "bench_parts" / "training" / "figures.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_training_figures", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


figures = load()

SURVIVOR = """\
1.0 form -1 4 10
2.0 step 1 4 10
3.1 step 2 4 10
3.2 form -1 3 10
3.5 step 3 3 10
5.0 form -1 4 10
5.5 step 4 4 10
"""
VICTIM = """\
1.0 form -1 4 20
2.0 step 1 4 20
4.0 start -1 0 30
4.5 imported -1 0 30
5.0 form -1 4 30
5.2 loaded 4 0 30
5.6 step 4 4 30
"""
RANKS = {0: figures.parse(SURVIVOR), 1: figures.parse(VICTIM)}


def test_a_step_that_was_on_its_way_is_no_recovery() -> None:
    assert figures.downtime(RANKS, 3.0, [0]) == pytest.approx(0.5)


def test_all_ranks_means_a_full_world() -> None:
    assert figures.downtime(RANKS, 3.0, [0, 1], 4) == pytest.approx(2.6)
    assert figures.downtime(RANKS, 3.0, [0], 4) == pytest.approx(2.5)


def test_nobody_back_is_no_figure() -> None:
    assert figures.downtime(RANKS, 5.55, [0, 1]) is None
    assert figures.downtime(RANKS, 3.0, [0, 7]) is None
    assert figures.downtime({}, 3.0, []) is None


def test_the_old_process_group_does_not_count_for_the_new_process() -> None:
    events = figures.parse("3.2 form -1 4 20\n3.5 start -1 0 30\n3.6 step 9 4 30\n")
    assert figures.recovered(events, 3.0) is None


@given(st.integers(0, len(VICTIM)))
def test_a_line_that_is_being_written_waits(length: int) -> None:
    whole = VICTIM[:length].count("\n")
    assert figures.parse(VICTIM[:length]) == figures.parse(VICTIM)[:whole]


def test_the_stages_add_up_to_the_downtime() -> None:
    ranks = {seat: figures.parse(VICTIM.replace("5.6", f"5.{6 + seat}")) for seat in range(3)}
    spent = figures.stages(ranks, 3.0)
    assert list(spent) == list(figures.STAGES)
    assert sum(spent.values()) == pytest.approx(figures.downtime(ranks, 3.0, range(3), 4))
    assert all(seconds >= 0 for seconds in spent.values())
    assert figures.stages({**ranks, 3: figures.parse(SURVIVOR)}, 3.0) is None


def test_recoveries_are_measured_one_by_one() -> None:
    text = "1 form -1 2 {0}\n2 step 1 2 {0}\n{1}3.2 form -1 2 {0}\n3.5 step 3 2 {0}\n"
    again = "4.0 form -1 2 {0}\n4.1 step 4 2 {0}\n"
    first, second = "3.0 fault -1 0 10\n", "3.9 fault -1 0 10\n"
    ranks = {
        0: figures.parse(text.format(10, first) + second + again.format(10)),
        1: figures.parse(text.format(20, "") + again.format(20)),
    }
    found = figures.recoveries(ranks, 0, [0, 1])
    assert found == pytest.approx([0.5, 0.2])
    assert figures.percentile(found, 0.99) == pytest.approx(0.5)
    assert figures.percentile(range(1, 201), 0.99) == 198
    with pytest.raises(ValueError, match="rank 1 was replaced"):
        figures.recoveries({**ranks, 1: [*ranks[1], *figures.parse(VICTIM)]}, 0, [0, 1])


def test_processor_time_is_that_of_one_step() -> None:
    assert figures.extra([(0.1, 0.101), (0.2, 0.2012)], 20)["median"] == pytest.approx(55)


def test_every_rank_must_be_warm() -> None:
    assert figures.past(RANKS, [0, 1], 4)
    assert not figures.past(RANKS, [0, 1], 5)
    assert not figures.past(RANKS, [0, 1, 2], 1)


def test_no_values_make_no_number() -> None:
    assert figures.summary([]) == {"median": None, "n": 0, "values": []}
    assert figures.summary([3.0, 1.0, 2.0])["median"] == 2.0


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=20),
    st.sampled_from([0.9, 1.0, 1.1]),
)
def test_a_constant_cost_is_found_exactly(plain: list[float], factor: float) -> None:
    found = figures.overhead([(seconds, seconds * factor) for seconds in plain])
    assert found["median"] == pytest.approx(factor - 1)
    assert found["interval"] == pytest.approx([factor - 1, factor - 1])


def test_the_keys_are_those_that_the_report_promises() -> None:
    assert len(figures.KEYS) == len(set(figures.KEYS)) == 39
    assert figures.KEYS[8:11] == ("rootless_init_4_s", "rootless_init_16_s", "rootless_init_32_s")
