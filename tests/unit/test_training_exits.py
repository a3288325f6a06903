"""The exit code of a training that ends before its time."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

pytest.importorskip("torch", reason="torch is not installed")

PROGRAM = """
import threading
from types import SimpleNamespace
from typing import Any

from slurm_resilience.training.exits import Exits

mesh: Any = SimpleNamespace(close=lambda: None)
nothing: Any = None
exits = Exits(mesh, nothing, nothing)


def train() -> None:
    exits.stopped("why")


if {thread}:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
"""


@pytest.mark.parametrize("thread", [True, False])
def test_a_training_that_gave_up_in_a_thread_is_no_success(thread: bool) -> None:
    """SystemExit ends a thread alone: the job was COMPLETED."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(PROGRAM.format(thread=thread))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 76, done.stderr
    assert done.stderr == "sres: the training gave up: why\n"
