"""A child and what it has started are ended together, and no stranger is."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from slurm_resilience.child_group import end_group

SECONDS = 20.0


def started(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)


def test_what_the_child_has_started_ends_with_it() -> None:
    child = started("sh", "-c", "sleep 600 & echo $!; wait")
    assert child.stdout is not None
    below = psutil.Process(int(child.stdout.readline()))
    assert end_group(child, SECONDS)
    assert child.returncode == -9 and child.stdout.closed
    psutil.wait_procs([below], timeout=SECONDS)
    assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE


def test_the_number_of_a_child_that_has_ended_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = started("true")
    child.wait(SECONDS)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    assert end_group(child, SECONDS) and not killed


def test_one_that_cannot_be_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    child = started("sleep", "600")
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda group, number: None)
        assert not end_group(child, 0.01)
    assert end_group(child, SECONDS)
