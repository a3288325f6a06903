"""The loss curves of trainings that change their size: from the ranks' lines to numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "elastic_curves.py"
    spec = importlib.util.spec_from_file_location("elastic_curves", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EVENTS: list[list[Any]] = [
    [1.0, "loss", 0, 5, 0, 4.0],
    [1.0, "loss", 0, 5, 4, 2.0],
    [1.1, "step", 1, 5, 2],
    [1.1, "step", 1, 5, 2],
    [1.2, "loss", 1, 5, 8, 9.0],  # its world was left before the step was done
    [1.5, "loss", 1, 7, 8, 1.0],
    [1.5, "loss", 1, 7, 12, 2.0],
    [1.6, "step", 2, 7, 1],
]


def test_a_step_counts_in_the_world_that_did_it(curves: ModuleType) -> None:
    assert curves.curve(EVENTS) == ((3.0, 1.5), (2, 1))


def test_the_line_of_a_rank_that_died_is_left_out(curves: ModuleType, tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in EVENTS]
    (tmp_path / "0.12.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (tmp_path / "1.13.jsonl").write_text("\n".join([*lines[4:], '[1.7, "loss", 2']))
    assert curves.read(tmp_path).worlds == (2, 1)


def test_without_matplotlib_it_says_what_to_install(
    curves: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.12.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in EVENTS))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(SystemExit, match="matplotlib is missing"):
        curves.main([str(tmp_path / "a.svg"), f"fixed={tmp_path}"])
    with pytest.raises(SystemExit, match="LOGS"):
        curves.main(["a.svg"])
