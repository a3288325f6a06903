"""Meshes in real processes: no fault costs a living rank its place, or the world its whole size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mesh_network
import pytest

CHAOS = Path(__file__).parents[1] / "support" / "mesh_chaos.py"
ROUNDS = int(os.environ.get("SRES_TEST_ROUNDS", "5"))
SEED = os.environ.get("SRES_TEST_SEED", "0")
NETWORK = ("--network", "--only", os.environ.get("SRES_TEST_CHAOS", "."))


@pytest.mark.timeout(60 + 120 * ROUNDS)
@pytest.mark.parametrize("shape", ["full", "speakers"])
@pytest.mark.parametrize("more", [(), NETWORK], ids=["loopback", "network"])
def test_no_fault_costs_a_living_rank_its_place(shape: str, more: tuple[str, ...]) -> None:
    if more and not mesh_network.is_possible():
        pytest.skip("needs root, ip, nft, ss and tc")
    argv = [sys.executable, str(CHAOS), "--mesh", shape, *more]
    argv += ["--rounds", str(ROUNDS), "--seed", SEED]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}{done.stderr}"
    print(done.stdout)
