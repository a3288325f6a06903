"""Slurm's commands tell that slurmctld is away: a caller may ask again."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.slurm.cli import CliClient


@pytest.mark.parametrize(
    "said",
    [
        "Unexpected message received for job 7",
        "slurm_update error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
    ],
)
def test_an_order_without_an_answer_may_be_given_again(tmp_path: Path, said: str) -> None:
    """The first is what `scontrol requeue` says, on 22.05 as on 26.05."""
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 7 7 N/A\n")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    for name in ("squeue", "scontrol"):
        (tmp_path / name).chmod(0o755)
    with pytest.raises(SlurmUnreachable):
        CliClient(str(tmp_path)).requeue(7)
