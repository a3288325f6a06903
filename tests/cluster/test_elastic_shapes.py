"""Elastic steps in other shapes, on real Slurm: groups of two nodes, named sizes, GRES, HSDP.

Each takes up to a minute: `SRES_TEST_ELASTIC=1` runs them.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle
from test_elastic_job import PATIENCE_SECONDS, Training, spec, state, submit
from test_living_step import Run

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
Labs = Callable[[LabSpec], Lab]
SHAPES = {
    "two nodes at a time": ("--auto-resume-max-nodes=4 --auto-resume-step-nodes=2", ""),
    "named sizes": ("--auto-resume-sizes=2,4", ""),
    "GRES": ("--auto-resume-max-nodes=4 --auto-resume-step-nodes=2", "gpu:2"),
}


def grows_and_shrinks(fresh_lab: Labs, wait_for: WaitFor, tmp_path: Path, shape: str) -> None:
    """2 → 4 → 2 (one of the two is preempted, and both go) → 4 nodes."""
    words, gres = SHAPES[shape]
    lab = fresh_lab(dataclasses.replace(spec(4), gres=gres or None))
    asked = (f"--gres={gres}",) if gres else ()
    run = Run(lab, tmp_path, *asked, nodes=2, srun=words)
    wait_for(lambda: run.world(0) == 4, 90, run)
    wait_for(lambda: run.event("grew"), 30, run)
    (grew,) = run.event("grew")
    assert len(grew["nodes"]) == 2 and grew["size"] == 4
    assert [run.lines(seat, 1)[0]["rank"] for seat in (2, 3)] == ["2", "3"]
    other = submit(run, 1, grew["nodes"][0])
    wait_for(lambda: state(lab, other) == "RUNNING", 30, run)
    wait_for(lambda: run.world(0) == 2, 30, run)
    lab.run(["scancel", other], check=True)
    wait_for(lambda: len(run.event("grew")) == 2, 90, run)
    wait_for(lambda: run.world(0) == 4, 30, run)
    assert not [seat for seat in (0, 1) if run.lines(seat, 1)] and not run.event("noticed")
    run.end()
    wait_for(lambda: "srun ended with 0" in run.ended(), 60, run)
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")
    lives = [run.lines(seat, life) for seat in range(4) for life in range(3)]
    seen = {line["world"] for lines in lives for line in lines}
    assert seen == {2, 4} if shape == "named sizes" else {2, 4} <= seen


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
def hsdp_grows_by_whole_replicas(fresh_lab: Labs, wait_for: WaitFor, tmp_path: Path) -> None:
    """A model in two parts: 2 → 4 → 2 → 4 ranks, and the bits of a run that kept its size."""
    steps, sizes = 20, "2,4,2,4"
    fixed = Training(tmp_path / "fixed", 2, "", steps, "--shard")
    elastic = Training(tmp_path / "elastic", 1, sizes, steps, "--shard")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    clean |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    subprocess.run(fixed.line, env=clean, cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    lab = fresh_lab(spec(4))
    run = Run(
        lab,
        elastic.folder,
        nodes=2,
        srun="--auto-resume-max-nodes=4 --auto-resume-step-nodes=2 env OMP_NUM_THREADS=1",
        line=" ".join(elastic.line),
    )
    wait_for(lambda: state(lab, run.id) == "RUNNING", 60, run)
    others = submit(run, 2)
    for size, step in ((4, 5), (2, 10), (4, 15)):
        wait_for(lambda s=size, n=step: elastic.waits_for(s, n), PATIENCE_SECONDS, run)
        if size == 4:
            lab.run(["scancel", others], check=True)
        else:
            others = submit(run, 2)
    wait_for(lambda: "srun ended with 0" in run.ended(), PATIENCE_SECONDS, run)
    assert elastic.worlds() == [int(size) for size in sizes.split(",") for _ in range(5)]
    elastic.check_samples()
    assert elastic.digest() == fixed.digest()


def a_plain_program_is_refused(fresh_lab: Labs, wait_for: WaitFor, tmp_path: Path) -> None:
    """One line says what is wrong and what to do, and nothing is started again."""
    lab = fresh_lab(spec(2))
    program = tmp_path / "plain.py"
    program.write_text("import torch\ntorch.ones(1)\n")
    line = f"{sys.executable} -m slurm_resilience.launcher --nproc-per-node=1 {program}"
    words = "--auto-resume-max-nodes=4 env -u SRES_CHECKPOINTLESS"
    run = Run(lab, tmp_path, nodes=2, srun=words, line=line)
    wait_for(lambda: "srun ended with 2" in run.ended(), 60, run)
    assert "plain.py cannot change its size while it runs" in run.text()
    assert "starting attempt" not in run.text()


if "SRES_TEST_ELASTIC" in os.environ:  # minutes, on a busy machine
    test_a_step_grows_and_shrinks = pytest.mark.parametrize("shape", SHAPES)(grows_and_shrinks)
    test_hsdp_grows_by_whole_replicas = hsdp_grows_by_whole_replicas
    test_a_plain_program_is_refused = a_plain_program_is_refused
