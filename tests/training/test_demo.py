"""The demo, as the README gives it: torch training through each fault, bit-equal at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.demo.phases import NAMES, NOT_IN_RANK
from slurm_resilience.lab import LabSpec
from slurm_resilience.lab.bring_up import missing

pytestmark = [pytest.mark.training, pytest.mark.cluster]


def demo(folder: Path, *words: str) -> dict[str, Any]:
    """Run it; its result."""
    pytest.importorskip("torch", reason="torch is not installed")
    lack = missing(LabSpec(nodes=6, network=True))
    if lack is not None:
        pytest.skip(f"needs a lab: {lack}")
    file = folder / "result.json"
    argv = [sys.executable, "-m", "slurm_resilience.demo.main", "--json", str(file), *words]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the first of them leaves the end of an undisturbed run."""
    return tmp_path_factory.mktemp("undisturbed") / "last.pt"


@pytest.mark.parametrize(
    ("fault", "more"),
    [
        ("power", ["--kill-sresctld"]),
        ("xid", ["--gres=gpu:2"]),
        ("admin", []),
        ("rank", []),
    ],
    ids=["power-sresctld-killed", "xid-gres", "admin", "rank"],
)
def test_training_goes_on_bit_equal(
    tmp_path: Path, undisturbed: Path, fault: str, more: list[str]
) -> None:
    result = demo(tmp_path, "--fault", fault, "--steps=200", f"--undisturbed={undisturbed}", *more)
    assert result["bit_equal"] is True
    assert result["fault"] == fault
    # From a checkpoint, and from the newest: none is lost where the fault comes right behind one.
    assert result["resumed_from"] >= 50 and result["resumed_from"] % 50 == 0
    assert 0 <= result["steps_lost"] <= 50
    assert result["loss_before"] == result["loss_after"]
    absent = NOT_IN_RANK if fault == "rank" else frozenset()
    for name in NAMES:
        assert (result["phases"][name] is None) == (name in absent), name
    assert result["nodes_marked"] == ([] if fault == "rank" else ["n3"])
    assert result["nodes_up"] == 6


def test_checkpointless_nobody_else_stops(tmp_path: Path) -> None:
    """Rank 0's node dies, and the others go on without a checkpoint."""
    # Half a minute is left after the fault: on a busy machine the new rank is long in importing
    # torch, and it must come before the end.
    result = demo(tmp_path, "--checkpointless", "--victim=rank0", "--steps=160", "--pace=0.25")
    assert result["problems"] == []
    assert result["steps"] == 160
    seen = result["phases"]
    assert all(value is not None for value in seen.values()), seen
    # Survivors may go on before sresctld is sure.
    assert seen["survivors_step"] <= seen["joined"] and seen["detected"] <= seen["joined"]
