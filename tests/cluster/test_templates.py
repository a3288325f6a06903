"""The templates of scripts/templates on real Slurm, each once: they are what people begin with."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
TEMPLATES = Path(__file__).resolve().parents[2] / "scripts" / "templates"
BIN = Path(sys.prefix) / "bin"
WITH_TORCH = ("sres-run.sbatch", "torchrun.sbatch", "train.sbatch")
CHOSEN = WITH_TORCH if os.environ.get("SRES_TEST_TEMPLATES") else ("train.sbatch",)
"""They load torch on each node, for many seconds."""
PROGRAM = """\
#!/usr/bin/env python3
import os, sys
from slurm_resilience.resume import attempt
for step in range(3):
    attempt.step(step)
    print("step", step, flush=True)
extra = ["on", os.environ["SLURMD_NODENAME"]] if "apart" in os.environ["SLURM_JOB_NAME"] else []
print("done:", os.environ["NNODES"], os.environ["SRES_TOKEN"], *sys.argv[1:3], *extra)
"""


@pytest.fixture
def lab(shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    return shared_lab(LabSpec(nodes=3, network=True))


def run(
    lab: Lab,
    wait_for: WaitFor,
    folder: Path,
    template: str,
    *words: str,
    nodes: int = 2,
    **env: str,
) -> list[str]:
    """Submit a template, wait for its end, and return its logs."""
    path = f"{BIN}:{os.environ['PATH']}"
    sbatch = ("sbatch", "--parsable", f"--nodes={nodes}", "--ntasks-per-node=1")
    if template == "array.sbatch":
        sbatch = ("sbatch", "--parsable", "--array=0-1")
    done = lab.run(
        [*sbatch, str(TEMPLATES / template), *words], cwd=folder, env={**env, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "sres:" not in done.stderr, done.stderr
    job = done.stdout.strip()
    queue = ["squeue", "--noheader", "-j", job]
    wait_for(lambda: not lab.run(queue).stdout.strip(), 120, f"{template}: job {job} has ended")
    wait_for(lambda: all_idle(lab), 30, "all nodes are idle again")
    return [path.read_text() for path in sorted(folder.glob("*.out"))]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def test_mpi(lab: Lab, wait_for: WaitFor, tmp_path: Path, program: Path) -> None:
    """Without an MPI here: srun starts the ranks."""
    words = ("mpi.sbatch", str(program), "a")
    (log,) = run(lab, wait_for, tmp_path, *words, MPI="none")
    assert len(re.findall(r"^done: 2 \d+\.0\.1 a$", log, re.MULTILINE)) == 2, log


def test_a_script_on_a_node_of_its_own(
    lab: Lab, wait_for: WaitFor, tmp_path: Path, program: Path
) -> None:
    words = ("script-apart.sbatch", str(program), "a")
    (log,) = run(lab, wait_for, tmp_path, *words, nodes=3)
    hosts = re.findall(r"^done: 2 \d+\.0\.1 a on (n\d)$", log, re.MULTILINE)
    assert sorted(hosts) == ["n2", "n3"], log


def test_an_array(lab: Lab, wait_for: WaitFor, tmp_path: Path, program: Path) -> None:
    logs = run(lab, wait_for, tmp_path, "array.sbatch", TRAIN=str(program))
    assert len(logs) == 2 and len(set(logs)) == 2
    for number, log in enumerate(logs):
        assert re.search(rf"^done: 1 \d+\.0\.1 --seed {number}$", log, re.MULTILINE), log


@pytest.mark.parametrize("template", CHOSEN)
def test_a_training(lab: Lab, wait_for: WaitFor, tmp_path: Path, template: str) -> None:
    train = str(TEMPLATES / "train_ddp.py")
    words = ("--steps=4", "--checkpoint-every=2")
    if template != "train.sbatch":
        words = (train, *words)
    (log,) = run(lab, wait_for, tmp_path, template, *words, TRAIN=train)
    assert "done: 4 steps on 2 ranks" in log, log
