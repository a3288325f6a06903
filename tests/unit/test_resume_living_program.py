"""Programs that can outlive a node are known by their launcher, however the user writes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume.live_step.living_program import (
    CHECKPOINTLESS,
    can_live,
    names_launcher,
    uses_training_library,
)
from slurm_resilience.resume.srun.srun_options import BUILTIN, split


@pytest.mark.parametrize(
    "program",
    [
        ["sres-run", "--nproc-per-node=8", "train.py"],
        ["/venv/bin/sres-run", "train.py"],
        ["./sres-run", "train.py"],
        ["python", "-m", "slurm_resilience.launcher", "train.py"],
        ["/usr/bin/python3.11", "-u", "-m", "slurm_resilience.launcher", "train.py"],
        ["python", "-mslurm_resilience.launcher", "train.py"],
        ["python", "-um", "slurm_resilience.launcher", "train.py"],
        ["python", "-m", "slurm_resilience.launcher.main", "train.py"],
        ["python", "/venv/bin/sres-run", "train.py"],
        ["python", "/src/slurm_resilience/launcher/__main__.py", "train.py"],
        ["python", "/src/slurm_resilience/launcher", "train.py"],
        ["env", "OMP_NUM_THREADS=1", "sres-run", "train.py"],
        ["numactl", "--interleave=all", "sres-run", "train.py"],
        ["apptainer", "exec", "--nv", "image.sif", "sres-run", "train.py"],
        ["bash", "-c", "module load cuda && exec sres-run --nproc-per-node=8 train.py"],
        ["bash", "-lc", "source env.sh; python -m slurm_resilience.launcher train.py"],
        ["bash", "--login", "-c", "python prepare.py\nsres-run train.py"],
        ["sh", "-ec", "python prepare.py && $VENV/bin/sres-run train.py"],
        ["sh", "-c", "bash -c 'sres-run train.py'"],
        ["env", "A=1", "bash", "-c", "(cd /work && sres-run train.py) | tee log"],
        ["bash", "-c", "sres-run train.py 'a quotation that does not end"],
    ],
)
def test_the_launcher_is_named(program: list[str]) -> None:
    assert names_launcher(program)
    command = split(["-N2", *program], BUILTIN)
    assert uses_training_library(command, {}) and can_live(command, {})
    assert not uses_training_library(command, {CHECKPOINTLESS: "0"})


@pytest.mark.parametrize(
    "program",
    [
        [],
        ["python", "train.py"],
        ["python", "train.py", "--launcher", "sres-run"],
        ["python", "-m", "slurm_resilience.launcher_of_mine", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["sres-run-of-mine", "train.py"],
        ["bash", "train.sh"],
        ["bash", "train.sh", "-c", "sres-run"],
        ["bash", "-c"],
        ["bash", "-c", "python train.py --by sres-run"],
        ["bash", "-c", "echo 'use sres-run instead'"],
    ],
)
def test_another_program(program: list[str]) -> None:
    assert not names_launcher(program)
    command = split(["-N2", *program], BUILTIN)
    assert not uses_training_library(command, {})
    assert uses_training_library(command, {CHECKPOINTLESS: "1"})


@given(st.lists(st.text(), max_size=5), st.text())
def test_any_words_are_read(words: list[str], text: str) -> None:
    assert names_launcher(["bash", "-c", text]) in (True, False)
    assert names_launcher([*words, "sres-run"]) or any(
        word.endswith(".py") or word.rpartition("/")[2] in ("sh", "bash", "dash", "ksh", "zsh")
        for word in words
    )
