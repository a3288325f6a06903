"""The figures of `scripts/bench resume`: from the logs of a run to its phases."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "bench_parts" / "resume"
KEYS = (
    "warm_rank_s warm_power_s relaunch_s spare_s swap_s companion_s requeue_s stock_requeue_s "
    "torchrun_rank_s"
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_resume_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


figures, ladder = load("phases"), load("rungs")


def steps(token: str, process: int, *at: float) -> list[dict[str, Any]]:
    return [{"at": when, "step": 1, "token": token, "process": process} for when in at]


def test_phases_of_a_relaunch() -> None:
    journal = [{"kind": "detected", "at": 104.0}, {"kind": "detected", "at": 50.0}]
    supervisor = [
        {"event": "started", "at": 90.0},
        {"event": "noticed", "at": 104.2},
        {"event": "step_ended", "at": 104.5},
        {"event": "nodes_ready", "at": 104.75},
        {"event": "started", "at": 105.0},
    ]
    # The old rank 0 may still end its step after the fault.
    training = steps("1", 7, 99.0, 100.25) + steps("2", 7, 109.0, 109.5)
    assert figures.phases(100.0, journal, supervisor, training) == {
        "detected": 4.0,
        "step_ended": 4.5,
        "nodes_ready": 4.75,
        "relaunched": 5.0,
        "first_step": 9.0,
    }
    assert figures.has_recovered(training, 100.0)
    assert not figures.has_recovered(training[:2], 100.0)


def test_a_rank_that_is_started_again_beside_its_launcher_has_the_same_token() -> None:
    training = steps("1", 7, 99.0) + steps("1", 8, 101.25)
    found = figures.phases(100.0, [], [], training)
    assert found == dict.fromkeys(figures.NAMES) | {"first_step": 1.25}


def test_stock_slurm_is_known_by_its_own_signs() -> None:
    training = steps("", 7, 99.0) + steps("", 8, 260.0)
    found = figures.phases(
        100.0, [], [], training, seen_down=131.0, script_began=[80.0, 255.0, 300.0]
    )
    assert found == {
        "detected": 31.0,
        "step_ended": None,
        "nodes_ready": 155.0,
        "relaunched": 155.0,
        "first_step": 160.0,
    }


def test_the_report_has_every_key_and_invents_nothing() -> None:
    run = dict.fromkeys(figures.NAMES) | {"first_step": 3.0}
    slow, fast = run | {"detected": 1.0, "first_step": 9.0}, run | {"first_step": 2.0}
    found = figures.report(
        ladder.KEYS, {"swap": [slow, run, fast], "companion": []}, {"companion": "not built"}
    )
    assert list(found)[:9] == KEYS.split()
    assert found["swap_s"] == 3.0
    assert found["phases"]["swap"]["detected"] == 1.0, "of the runs that have it"
    assert found["companion_s"] is None and found["requeue_s"] is None
    assert "companion" not in found["phases"]
    assert found["missing"] == {"companion": "not built"}


@pytest.mark.parametrize("rung", ladder.RUNGS, ids=lambda rung: rung.name)
def test_a_rung_is_proved_by_the_job_s_log_unless_it_is_a_rival_s(rung: Any) -> None:
    assert bool(rung.marker) is bool(rung.target)
    assert ("--auto-resume=1" in rung.srun) is bool(rung.target)
