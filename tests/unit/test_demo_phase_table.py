"""The demo's closing table: a target that was missed cannot be overlooked."""

from __future__ import annotations

import io

from rich.console import Console

from slurm_resilience.demo.phase_table import phase_table

LABELS = {"marked": "node marked", "first_step": "first step", "node_back": "node back"}


def _lines(seconds: dict[str, float | None], targets: dict[str, float]) -> dict[str, str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(phase_table("Recovery", LABELS, seconds, targets))
    text = console.export_text()
    return {
        name: next(x for x in text.splitlines() if label in x) for name, label in LABELS.items()
    }


def test_only_a_missed_target_is_flagged() -> None:
    seconds = {"marked": 4.0, "first_step": 12.5, "node_back": 5.0}
    lines = _lines(seconds, {"first_step": 12.0, "node_back": 60.0})
    assert "missed: ≤ 12" in lines["first_step"]
    assert "≤ 60" in lines["node_back"] and "missed" not in lines["node_back"]
    assert "≤" not in lines["marked"]


def test_a_phase_that_was_not_seen_misses_its_target() -> None:
    seconds: dict[str, float | None] = {"marked": None, "first_step": None, "node_back": 1.0}
    lines = _lines(seconds, {"first_step": 12.346})
    assert "–" in lines["first_step"] and "missed: ≤ 12.35" in lines["first_step"]
    assert "missed" not in lines["marked"]
