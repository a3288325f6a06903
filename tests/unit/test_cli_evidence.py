"""`sres evidence` writes into a directory of its own, whatever another user does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli.past import evidence_command
from slurm_resilience.errors import UsageError


def test_the_files_are_the_callers_alone(tmp_path: Path) -> None:
    evidence_command._write(tmp_path / "new", {"kernel.log": "line\n"})
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new/kernel.log").read_text() == "line\n"
    with pytest.raises(UsageError, match="new exists; name another one with --output"):
        evidence_command._write(tmp_path / "new", {})


@pytest.mark.parametrize("by", ["link", "folder"])
def test_a_directory_that_is_exchanged_meanwhile_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The folder around it is another user's, who may rename what lies in it."""
    system = tmp_path / "system"
    system.mkdir()
    mkdir = Path.mkdir

    def exchanged(path: Path, *args: Any, **more: Any) -> None:
        mkdir(path, *args, **more)
        path.rename(tmp_path / "away")
        if by == "link":
            path.symlink_to(system)
        else:
            mkdir(path)

    monkeypatch.setattr(Path, "mkdir", exchanged)
    if by == "folder":  # another user's
        monkeypatch.setattr("os.geteuid", lambda: 4711)
    with pytest.raises(UsageError):
        evidence_command._write(tmp_path / "new", {"kernel.log": "line\n"})
    assert not list(system.iterdir()) and not list(tmp_path.glob("*/kernel.log"))
