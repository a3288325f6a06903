"""The books of a checkpointless run: each sample once, one world a step, equal replicas."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.demo.accounting import phases, verdict

Line = dict[str, Any]


def world(generation: int, seats: list[int], steps: range, at: float = 0.0) -> list[Line]:
    """Lines of a world that does these steps, four samples each."""
    lines = []
    for step in steps:
        for index, seat in enumerate(seats):
            base = {"step": step, "seat": seat, "world": len(seats), "generation": generation}
            here = [step * 4 + n for n in range(4) if n % len(seats) == index]
            when = {"at": at + step / 10}
            lines.append(base | when | {"what": "took", "samples": here})
            lines.append(base | when | {"what": "done", "loss": float(seat), "share": len(here)})
    return lines


def ends(*digests: str) -> list[Line]:
    return [
        {"what": "end", "seat": i, "step": 4, "world": 2, "generation": 2, "at": 9.0, "digest": d}
        for i, d in enumerate(digests)
    ]


GOOD = [*world(1, [0, 1], range(1, 3)), *world(2, [0], range(3, 5)), *ends("a", "a")]


def test_a_run_in_two_worlds() -> None:
    found = verdict(GOOD, 4, 4)
    assert (found.problems, found.steps, found.loss) == ((), 4, 0.0)


def test_a_step_that_was_begun_twice_counts_where_it_was_done() -> None:
    begun = [line for line in world(1, [0, 1], range(3, 4)) if line["what"] == "took"]
    assert verdict([*GOOD, *begun], 4, 4).problems == ()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*GOOD, *world(1, [1], range(3, 4))], "committed in 2 worlds"),
        (GOOD[:-4], "committed in 0 worlds"),
        ([line for line in GOOD if line["what"] != "took" or line["seat"]], "samples"),
        ([*GOOD, *ends("b")], "2 different states"),
        ([{**x, "samples": [1, 2]} if x["what"] == "took" else x for x in GOOD], "second time"),
    ],
)
def test_what_is_wrong_is_said(lines: list[Line], words: str) -> None:
    assert any(words in problem for problem in verdict(lines, 4, 4).problems)


def test_phases() -> None:
    training = [
        *world(1, [0, 1], range(1, 3)),
        *world(2, [0], range(3, 5), at=10.0),
        *world(3, [0, 1], range(5, 6), at=20.0),
    ]
    journal = [{"node": "n2", "kind": kind, "at": 4.0} for kind in ("detected", "marked")]
    supervisor = [{"event": "nodes_ready", "at": 5.0}, {"event": "joining", "at": 5.5}]
    found = phases(1.0, "n2", [1], journal, supervisor, training)
    assert found == {
        "detected": 3.0,
        "marked": 3.0,
        "survivors_step": 9.3,
        "node_idle": 4.0,
        "step_started": 4.5,
        "joined": 19.5,
        "node_back": None,
    }
