"""The supervisor's environment, and the commands that it uses: those that plain srun has."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.config import Config
from slurm_resilience.resume.call import start
from slurm_resilience.resume.call.start import _client


@pytest.mark.parametrize(
    ("before", "shown"), [({}, "None"), ({"LC_CTYPE": "C"}, "C"), ({"LC_ALL": "C.UTF-8"}, "None")]
)
def test_python_leaves_no_variable_of_its_own(before: dict[str, str], shown: str) -> None:
    """In the locale C it sets LC_CTYPE, which plain srun's tasks do not have."""
    text = (
        "from slurm_resilience.resume import main; print(main._own_environment().get('LC_CTYPE'))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", text], env=before, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == shown


def test_exit_codes_are_told_where_the_caller_wants_none() -> None:
    """A process that ignores SIGCHLD gets none of its children from the kernel: Python says 0."""
    text = (
        "import signal, subprocess; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "from slurm_resilience.resume import main; print(main.run('srun', []), "
        "subprocess.call(['sh', '-c', 'exit 7']))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", text],
        env={"SRES_CONFIG": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[1] == "7", done


def test_slurms_commands_are_those_beside_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun may be called by its path, and a user may have a squeue of his own in ~/bin."""
    theirs, own = tmp_path / "slurm", tmp_path / "home"
    for folder, names in ((theirs, ("scontrol", "squeue", "scancel")), (own, ("scontrol",))):
        folder.mkdir()
        for name in names:
            text = f"echo ClusterName = c; echo 'SlurmctldHost[0] = {folder.name}'"
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{own}:/usr/bin:/bin")
    assert _client(Config(), str(theirs / "srun")).info().controllers == ("slurm",)
    # A program that only calls the real one.
    assert _client(Config(), str(own / "srun")).info().controllers == ("home",)
    chosen = Config(slurm_bin=str(theirs))
    assert _client(chosen, str(own / "srun")).info().controllers == ("slurm",)


def test_what_cannot_be_loaded_while_the_step_runs_is_told_by_what_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its file system does not answer, say. The collector of garbage is on again all the same."""

    def fail(name: str) -> None:
        raise OSError(5, "Input/output error", name)

    monkeypatch.setattr(importlib, "import_module", fail)
    gc.disable()
    try:
        start.load_late()
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
