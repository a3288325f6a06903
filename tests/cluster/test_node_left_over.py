"""A process that outlives its job: "Kill task failed" on real Slurm."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]


@pytest.fixture
def users_folder() -> Iterator[Path]:
    """A folder that every user may write to; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_what_a_job_left_is_ended_and_the_node_resumed(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, users_folder: Path
) -> None:
    """Slurm has no grip on a process that has left its session, and says so by this reason."""
    lab = fresh_lab(LabSpec(nodes=2, network=True))
    wait_for(lambda: all_idle(lab), 30, "every node is idle")
    beats = users_folder / "beats"
    body = f"while :; do echo x >> {beats}; sleep 0.1; done"
    task = f"setsid sh -c '{body}' >/dev/null 2>&1 </dev/null & sleep 0.5"
    lab.run(["srun", "-N1", "-w", "n2", "sh", "-c", task], cwd="/", user="alice", check=True)
    wait_for(lambda: all_idle(lab), 30, "the job is over")
    size = beats.stat().st_size
    wait_for(lambda: beats.stat().st_size > size, 10, "it has outlived its job")
    mark = ["scontrol", "update", "nodename=n2", "state=drain", "reason=Kill task failed"]
    lab.run(mark, check=True)
    wait_for(lambda: "left-over-ended" in kinds(lab, "n2"), 60, "it is ended")
    (event,) = [e for e in events(lab) if e["kind"] == "left-over-ended"]
    assert "alice" in event["text"]
    wait_for(lambda: all_idle(lab), 30, "the node is resumed")
    size = beats.stat().st_size
    assert lab.run(["srun", "-w", "n2", "sleep", "0.5"]).returncode == 0
    assert beats.stat().st_size == size
    assert not {"detected", "marked", "replacing"} & {e["kind"] for e in events(lab)}
