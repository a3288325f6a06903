"""Cached batches over the deaths of real processes, and shared by several of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.training

SCRIPT = Path(__file__).with_name("data_ranks.py")
WHOLE = list(range(120))


def run(scenario: str, home: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SRES_"))}
    env |= {"OMP_NUM_THREADS": "1", "SRES_DIR": str(home)}
    argv = [sys.executable, str(SCRIPT), scenario, str(home)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=100, env=env, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def reads(home: Path) -> list[tuple[int, int]]:
    """(pid, sample) of each reading of the source."""
    found = [line.split() for line in (home / "reads").read_text().splitlines()]
    return [(int(pid), int(index)) for pid, index in found]


def given(home: Path, number: int) -> list[list[int]]:
    batches: list[list[int]] = json.loads((home / f"given.{number}").read_text())
    assert sorted(sample for batch in batches for sample in batch) == WHOLE
    return batches


def test_eight_processes_read_once(tmp_path: Path) -> None:
    run("eight", tmp_path)
    assert all(given(tmp_path, number) == given(tmp_path, 0) for number in range(8))
    found = reads(tmp_path)
    assert Counter(index for _, index in found) == Counter(WHOLE)
    assert len({pid for pid, _ in found}) == 1
    assert not (tmp_path / "cache").exists(), "the last one out removed it"


def test_another_member_fetches_when_the_leader_dies(tmp_path: Path) -> None:
    run("takeover", tmp_path)
    assert given(tmp_path, 1) == given(tmp_path, 2)
    found = reads(tmp_path)
    assert len({pid for pid, _ in found}) == 2
    again = Counter(index for _, index in found)
    assert set(again) == set(WHOLE)
    assert sum(again.values()) <= len(WHOLE) + 4, "one batch may have been under way"


def test_after_sigkill_the_first_batches_need_no_source(tmp_path: Path) -> None:
    run("kill", tmp_path)
    successor = int((tmp_path / "successor").read_text())
    assert successor not in {pid for pid, _ in reads(tmp_path)}


def test_killed_at_any_moment_no_sample_is_lost_or_repeated(tmp_path: Path) -> None:
    run("storm", tmp_path)
    consumed = [json.loads(line) for line in (tmp_path / "consumed").read_text().splitlines()]
    counts = Counter(sample for batch in consumed for sample in batch)
    assert set(counts) == set(WHOLE)
    # Killed between its commit and writing it down, a process consumes that batch once more.
    assert counts.total() - len(WHOLE) <= 4 * 8
    assert not (tmp_path / "cache").exists()
