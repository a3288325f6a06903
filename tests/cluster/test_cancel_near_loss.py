"""A person's cancel wins, whatever else ends the step at the same time."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beside import FLAG, Site, WaitFor, allocate

from slurm_resilience.lab import Lab, LabSpec

PROGRAM = "echo run >>runs; echo up; exec sleep 600"


@pytest.fixture
def site(
    fresh_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> Iterator[Site]:
    """A job with a node to spare: without the cancel the step would run again at once."""
    lab = fresh_lab(LabSpec(nodes=5, network=True, plugin=built_plugin))
    yield Site(lab, allocate(lab, "-w", "n[1-4]", "--exclusive"), tmp_path, wait_for)


def start(site: Site) -> subprocess.Popen[str]:
    srun = site.start("srun", FLAG, "-N3", "sh", "-c", PROGRAM)
    assert srun.stdout is not None
    assert [srun.stdout.readline() for _ in range(3)] == ["up\n"] * 3
    site.wait_for(site.steps, 30, "the step")
    return srun


@pytest.mark.parametrize("lost", ["n1", "n3"], ids=["the first node", "the last node"])
def test_a_step_that_is_cancelled_as_its_node_dies_stays_ended(site: Site, lost: str) -> None:
    """The first node is the one that says so; srun then waits for the lost one."""
    srun = start(site)
    (step,) = site.steps()
    site.lab.power_off(lost)
    site.lab.run(["scancel", step], check=True)
    _, said = srun.communicate(timeout=60)
    assert srun.returncode != 0
    assert (site.directory / "runs").read_text() == "run\n" * 3, said
    assert "starting attempt" not in said
    assert site.job_state(site.job) == "RUNNING"


def test_a_step_that_only_loses_its_node_runs_again(site: Site) -> None:
    srun = start(site)
    site.lab.power_off("n3")
    assert srun.stdout is not None
    assert [srun.stdout.readline() for _ in range(3)] == ["up\n"] * 3
    (step,) = site.wait_for(site.steps, 30, "the next step")
    site.lab.run(["scancel", step], check=True)
    _, said = srun.communicate(timeout=60)
    assert "starting attempt 2 on n[1-2,4]" in said
    assert (site.directory / "runs").read_text() == "run\n" * 6
