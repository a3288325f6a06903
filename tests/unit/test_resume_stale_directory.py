"""A shared file system that fails for a moment costs a step no help of its supervisor's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from slurm_resilience.resume.live_step.training import find_rendezvous


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_meeting_place_that_cannot_be_seen_now_is_looked_for_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the look every ten seconds, in every step."""
    meeting = tmp_path / "mesh"
    (meeting / "peers" / "0").mkdir(parents=True)

    def fails(_: Path) -> bool:
        raise OSError(number, "not now")

    with monkeypatch.context() as moment:
        moment.setattr(Path, "is_dir", fails)
        assert find_rendezvous(str(tmp_path)) is None
    assert find_rendezvous(str(tmp_path)) == meeting
