"""A program called srun that starts the supervisor again is refused, in one line, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.resume.call.own_marker import MARKER, is_called_back, own_marker
from slurm_resilience.resume.srun.srun_options import CALLS_BACK

CLI = f"{sys.executable} -m slurm_resilience.cli.main"
RESUME = f"{sys.executable} -m slurm_resilience.resume.main"
CALL_SECONDS = 60


@pytest.fixture
def wrapper(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "srun"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize("begin", ["", "exec "])
@pytest.mark.parametrize("again", ["sres run", "sres-resume"])
@pytest.mark.parametrize("word", ["true", "--help"])
def test_a_wrapper_that_starts_the_supervisor_is_refused(
    wrapper: Path, begin: str, again: str, word: str
) -> None:
    calls = wrapper.with_name("calls")
    called = f"{CLI} run -- srun" if again == "sres run" else f"{RESUME} --srun {wrapper} --"
    wrapper.write_text(f'#!/bin/sh\necho call >> {calls}\n{begin}{called} "$@"\n')
    wrapper.chmod(0o755)
    environment = os.environ | {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*CLI.split(), "run", "--", "srun", word],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
        check=False,
    )
    assert done.returncode == UsageError.exit_code
    assert done.stderr.startswith(f"srun: error: sres: {wrapper} {CALLS_BACK}: name Slurm's own ")
    assert done.stderr.count("\n") == 1
    assert calls.read_text() == "call\n"


def test_a_task_of_a_supervised_step_may_start_a_supervisor() -> None:
    """It has the marker in its environment, and is no child of the process that left it."""
    other = subprocess.run(["sh", "-c", "cat /proc/self/stat"], capture_output=True, check=True)
    number, fields = other.stdout.split()[0].decode(), other.stdout.rpartition(b")")[2].split()
    assert not is_called_back({MARKER: f"{number}.{fields[19].decode()}"})
    assert not is_called_back({MARKER: ""})
    assert not is_called_back({MARKER: f"{os.getpid()}.1"}), "the number is used again"
    assert is_called_back({MARKER: own_marker()})
