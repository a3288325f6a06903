"""The demo, as the README gives it: torch training through each fault, bit-equal at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.demo.phases import NAMES, NOT_IN_RANK
from slurm_resilience.lab import LabSpec
from slurm_resilience.lab.life import missing

pytestmark = [pytest.mark.training, pytest.mark.cluster]


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
def test_training_goes_on_bit_equal(tmp_path: Path, fault: str, more: list[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    lack = missing(LabSpec(nodes=6, network=True))
    if lack is not None:
        pytest.skip(f"needs a lab: {lack}")
    file = tmp_path / "result.json"
    argv = [sys.executable, "-m", "slurm_resilience.demo.main", "--fault", fault]
    argv += ["--steps", "200", "--json", str(file), *more]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads(file.read_text())
    assert result["bit_equal"] is True
    assert result["fault"] == fault
    assert 0 < result["steps_lost"] <= 50
    assert result["loss_before"] == result["loss_after"]
    absent = NOT_IN_RANK if fault == "rank" else frozenset()
    for name in NAMES:
        assert (result["phases"][name] is None) == (name in absent), name
    assert result["nodes_marked"] == ([] if fault == "rank" else ["n3"])
    assert result["nodes_up"] == 6
