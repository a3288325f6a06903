"""The figures of `scripts/bench elastic` on changes of size: from the ranks' lines to numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PARTS = Path(__file__).parents[2] / "scripts" / "bench_parts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "elastic_changes")


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(PARTS / "training"), *sys.path])
    spec = importlib.util.spec_from_file_location(f"bench_{name}", PARTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    spec.loader.exec_module(module)
    for name in {"drive", "figures"} - before:
        monkeypatch.delitem(sys.modules, name)
    return module


def events(bench: ModuleType, text: str) -> list[Any]:
    return [
        bench.Event(float(at), name, int(number), int(world), int(pid))
        for at, name, number, world, pid in (line.split() for line in text.splitlines())
    ]


def step(number: int, generation: int, shares: dict[int, list[int]], committed: bool = True) -> Any:
    lines: list[tuple[int, dict[str, Any]]] = [
        (rank, {"step": number, "generation": generation, "ids": ids})
        for rank, ids in shares.items()
    ]
    if committed:
        lines += [(rank, {"committed": number, "generation": generation}) for rank in shares]
    return lines


def test_a_step_that_was_done_again_counts_once(bench: ModuleType) -> None:
    lines = step(0, 5, {0: [0, 1], 1: [2, 3]})
    lines += step(1, 5, {0: [4, 5], 1: [6, 7]}, committed=False)
    lines += step(1, 6, {0: [4, 5, 6, 7]})
    found = bench.told([*lines, (0, {"digest": "a"})], 8)
    assert found == (0, 0, ("a",))


def test_samples_that_are_lost_or_come_again_are_counted(bench: ModuleType) -> None:
    assert bench.told(step(0, 5, {0: [0, 1], 1: [1, 2]}), 4)[:2] == (1, 1)


def test_a_usual_step_is_one_before_the_fault(bench: ModuleType) -> None:
    text = "1.0 step 1 4 9\n1.1 step 2 4 9\n1.2 step 3 4 9\n1.4 step 4 4 9\n9.0 step 5 3 9\n"
    ranks = {rank: events(bench, text) for rank in bench.SURVIVORS}
    assert bench.usual_step(ranks, 2.0) == pytest.approx(0.1)


def test_a_join_is_measured_on_the_ranks_that_were_there(bench: ModuleType) -> None:
    text = "1.0 step 5 4 9\n3.0 step 6 3 9\n3.{0} step 7 3 9\n{1}"
    ranks = {
        rank: events(bench, text.format(4, f"3.{6 + rank} step 8 4 9\n"))
        for rank in bench.SURVIVORS
    }
    assert bench.joined(ranks, 2.0) == pytest.approx(0.5)
    ranks[0] = events(bench, text.format(4, ""))
    assert bench.joined(ranks, 2.0) is None


def test_a_change_is_taken_apart_by_the_rank_that_is_last(bench: ModuleType) -> None:
    text = "0.9 step 5 4 9\n1.0 left -1 0 9\n1.{0} met -1 3 9\n1.5 formed -1 3 9\n1.6 form -1 3 9\n"
    text += "2.{1} step 6 3 9\n3.0 step 7 3 9\n"
    ranks = {rank: events(bench, text.format(1 + rank, rank)) for rank in bench.SURVIVORS}
    found = bench.parts(ranks, 0.95, bench.SURVIVORS, 3)
    wanted = {"left": 0.05, "met": 0.4, "formed": 0.1, "form": 0.1, "step": 0.7}
    assert found == pytest.approx(wanted)


def test_all_standstills_of_an_evacuation_count(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = load(monkeypatch, "elastic_lab")
    times = [0, 1, 2, 3, 4, 5.5, 6.5, 8.25, 9.25]
    steps = events(lab, "".join(f"{at} step 1 3 9\n" for at in times))
    assert lab.lost_steps(steps, 3.5, 9.0) == pytest.approx(1.25)
    assert lab.standstill_steps(steps, 3.5, 9.0) == pytest.approx(0.75)
    assert lab.lost_steps(steps, 3.5, 5.0) == 0
