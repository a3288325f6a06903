"""A further attempt on real Slurm: when its tasks run, and what the log says until then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from beside import FLAG, Site, WaitFor, allocate
from jobs import Job

from slurm_resilience.lab import Lab, LabSpec

SLOW = {"resume": {"diagnosis_wait": 5.0}}
"""Another srun starts while the supervisor waits for a finding about its nodes."""
NODES = 18
"""slurmstepds of more than 7 nodes report their end through each other, and wait for a dead one:
Slurm shows the step for another minute then."""


def test_a_wide_step_that_lost_a_node_is_not_waited_for(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(LabSpec(nodes=NODES + 1, network=True))
    job = Job(lab, tmp_path, nodes=NODES)
    wait_for(lambda: job.running_on(1, NODES), 60, job)
    lab.power_off("n5")
    again = wait_for(lambda: job.running_on(2, NODES), 40, job)
    assert {task["restarts"] for task in again} == {0}
    wait_for(lambda: "recovered: attempt 2" in job.log(), 10, job)
    assert job.log().index("starting attempt 2") < job.log().index("recovered")
    at = {}
    for line in (job.folder / "events").read_text().splitlines():
        event = json.loads(line)
        at[event["event"]] = event["at"]
    print({name: round(seconds - at["noticed"], 2) for name, seconds in at.items()})
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_nothing_is_recovered_while_the_step_waits_for_its_turn(
    shared_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    """Another srun of the job took the nodes meanwhile: it is waited for, as with plain srun."""
    lab = shared_lab(LabSpec(nodes=3, plugin=built_plugin, daemons=False, sres_options=SLOW))
    job = allocate(lab, "-w", "n[1-2]", "--exclusive")
    site = Site(lab, job, tmp_path, wait_for)
    first = "[ $SRES_ATTEMPT = 2 ] || kill -9 $$"
    second = "echo up; while [ ! -e end ]; do sleep 0.05; done"
    log = tmp_path / "log"
    with log.open("w") as stderr:
        words = ["srun", FLAG, "-n1", "-w", "n1", "sh", "-c", first]
        flagged = lab.popen(words, cwd=tmp_path, env=site.environment, stderr=stderr.fileno())
    wait_for(lambda: "Killed" in log.read_text(), 30, "the first attempt's end")
    other = site.start("srun", "-n1", "-w", "n1", "sh", "-c", second)
    assert other.stdout is not None and other.stdout.readline() == "up\n"
    shown = ["scontrol", "show", "step", job, "-o"]
    wait_for(lambda: "State=PENDING" in lab.run(shown).stdout, 30, "it waits for its turn")
    assert "starting attempt 2" in log.read_text()
    assert "recovered" not in log.read_text()
    (tmp_path / "end").touch()
    assert flagged.wait(90) == 0
    assert "recovered: attempt 2" in log.read_text()
    assert other.wait(30) == 0
    site.expect_nothing_left()
    lab.run(["scancel", job])
