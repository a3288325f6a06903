"""A plugin and a supervisor of different releases: the step is resumed, and one line says so."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.resume.srun.env_option import PROTOCOL

SPANK = Path(__file__).resolve().parents[2] / "spank"


@pytest.fixture(scope="module")
def other_plugin(tmp_path_factory: pytest.TempPathFactory, plugin_headers: list[str]) -> Path:
    """sres.so of another release."""
    directory = tmp_path_factory.mktemp("other-spank")
    command = ["make", "-C", SPANK, f"BUILD={directory}", "CPPFLAGS=-DSRES_PROTOCOL=9"]
    subprocess.run([*command, *plugin_headers, "all"], check=True, capture_output=True)
    return directory / "sres.so"


def test_the_step_is_resumed_without_the_plugin(
    other_plugin: Path,
    fresh_lab: Callable[[LabSpec], Lab],
    wait_for: Callable[..., object],
    tmp_path: Path,
) -> None:
    lab = fresh_lab(LabSpec(nodes=3, plugin=other_plugin, network=True))
    job = Job(lab, tmp_path, srun="srun --auto-resume=1 -N2 -n2", nodes=2)
    wait_for(lambda: job.running_on(1, 2), 30, job)
    first = job.running_on(1, 2)
    assert {task["node_list"] for task in first} == {"n[1-2]"}
    assert [task["node_rank"] for task in first] == [0, 1]
    lab.power_off("n2")
    wait_for(lambda: job.running_on(2, 2), 60, job)
    again = job.running_on(2, 2)
    assert {task["node_list"] for task in again} == {"n[1,3]"}
    said = f"of different releases (protocol 9 and {PROTOCOL})"
    assert job.log().count(said) == 1
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_a_plugin_that_is_taken_away_ends_no_job(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: Callable[..., object], tmp_path: Path
) -> None:
    """Slurm was updated, and the plugin is not installed yet, when a task of a long job fails."""
    lab = fresh_lab(LabSpec(nodes=3, network=True))
    job = Job(lab, tmp_path, srun="srun --auto-resume=1 -N2 -n2", nodes=2)
    wait_for(lambda: job.running_on(1, 2), 30, job)
    (lab.directory / "etc" / "plugstack.conf").write_text("")
    lab.power_off("n2")
    wait_for(lambda: job.running_on(2, 2), 60, job)
    again = job.running_on(2, 2)
    assert {task["node_list"] for task in again} == {"n[1,3]"}
    assert "srun has no plugin that fits any more" in job.log()
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
