"""Left-over processes of jobs that are over are ended, and no others."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from slurm_resilience.agent.processes import process_reader
from slurm_resilience.agent.processes.left_over import end_left_over

USER = 65534
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def node() -> str:
    return f"n-{uuid.uuid4().hex}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process with an environment; it is ended after the test."""
    started = []

    def go(user: int = USER, first: str = "", **environment: str) -> subprocess.Popen[bytes]:
        words = ["sh", "-c", f"{first} echo ready; exec sleep 600"]
        env = {"PATH": os.environ["PATH"]} | environment
        made = subprocess.Popen(words, user=user, env=env, stdout=subprocess.PIPE, cwd="/")
        started.append(made)
        assert made.stdout is not None and made.stdout.readline() == b"ready\n"
        return made

    yield go
    for process in started:
        process.kill()
        process.communicate()


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may end others' processes")


def test_only_users_processes_of_jobs_that_are_over_are_ended(start: Start, node: str) -> None:
    over = start(SLURM_JOB_ID="7", SLURMD_NODENAME=node)
    stubborn = start(first="trap '' TERM;", SLURM_JOB_ID="8", SLURMD_NODENAME=node)
    others = [
        start(SLURM_JOB_ID="9", SLURMD_NODENAME=node),
        start(SLURM_JOB_ID="7", SLURMD_NODENAME="another"),
        start(SLURM_JOB_ID="7"),
        start(SLURMD_NODENAME=node),
        start(user=0, SLURM_JOB_ID="7", SLURMD_NODENAME=node),
    ]
    told = end_left_over(node, {9})
    assert told.left == () and len(told.ended) == 2
    # One whose memory is gone already may be seen by its parent a moment later.
    assert over.wait(10) is not None and stubborn.wait(10) is not None
    assert [process.poll() for process in others] == [None] * len(others)


def test_nothing_left_is_nothing_to_do(node: str) -> None:
    told = end_left_over(node, ())
    assert (told.ended, told.left) == ((), ())


def test_what_hangs_with_its_memory_is_named_and_holds_up_nothing(
    start: Start, node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/fuse").exists():
        pytest.skip("needs FUSE: there is no /dev/fuse")
    monkeypatch.setattr(process_reader, "QUIET_SECONDS", 0.3)
    where = tmp_path / "mounted"
    where.mkdir()
    program = Path(__file__).parents[1] / "support" / "hung_memory.py"
    words = ["unshare", "-m", sys.executable, program, where, str(USER)]
    hung = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while psutil.Process(hung.pid).status() != psutil.STATUS_DISK_SLEEP:
            assert time.monotonic() < deadline, "it does not hang"
            if (tmp_path / "hangs").exists() and selectable(hung.stdout):
                pytest.skip("this kernel waits for no write under the lock on a process's memory")
        over = start(SLURM_JOB_ID="7", SLURMD_NODENAME=node)
        told = end_left_over(node, ())
        assert over.wait(10) is not None and len(told.ended) == 1
        (left,) = told.left
        assert left.startswith(f"{hung.pid} python") and "it hangs" in left
    finally:
        os.killpg(hung.pid, signal.SIGKILL)
        hung.communicate()


def selectable(pipe: IO[bytes] | None) -> bool:
    return bool(select.select([pipe], [], [], 0.01)[0])
