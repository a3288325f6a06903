"""`scripts/check-commit` refuses a subject that is not `room: imperative`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "scripts" / "check-commit"


def refused(tmp_path: Path, message: str) -> str:
    """Return what the check prints about a message; empty: it accepts it."""
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message, encoding="utf-8")
    result = subprocess.run([CHECK, file], capture_output=True, text=True, timeout=10, check=False)
    assert (result.returncode == 0) == (not result.stderr)
    return result.stderr


@pytest.mark.parametrize(
    "message",
    [
        "lab: keep a disk over a reboot\n\nThe body may be long and says why it is so. " + "x" * 80,
        "cli, docs: bring the two tables into one\n",
        "# a remark of git's\nmesh: pass the lead on\n",
        "demo/main: focus on one node",
        'Revert "lab: keep a disk over a reboot"',
    ],
)
def test_a_good_message_is_accepted(tmp_path: Path, message: str) -> None:
    assert refused(tmp_path, message) == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Keep a disk over a reboot", "begin with the room"),
        ("Lab: keep a disk over a reboot", "begin with the room"),
        ("lab:keep a disk", "begin with the room"),
        ("lab: keeps a disk over a reboot", "imperative"),
        ("lab: fixed the disk", "imperative"),
        ("lab: fixing the disk", "imperative"),
        ("lab: keep a disk over a reboot.", "full stop"),
        ("lab: " + "keep " * 15, "72 at most"),
    ],
)
def test_a_bad_one_is_refused_with_the_reason(tmp_path: Path, message: str, reason: str) -> None:
    assert reason in refused(tmp_path, message)
