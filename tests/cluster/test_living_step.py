"""A living step on real Slurm: nodes and tasks are lost, the others go on, and new ones join."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle, kinds

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
TASK = Path(__file__).with_name("living_task.py")
XID = "NVRM: Xid (PCI:0000:04:00): 64, Failed to persist row remap table"


class Run:
    """One supervised step of the toy training, in a job of its own."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *sbatch: str,
        srun: str = "",
        nodes: int = 4,
        code: int = 0,
        launcher: str = "",
        config: Path | None = None,
        line: str = "",
    ) -> None:
        line = line or f"{launcher} {sys.executable} {TASK} {code}"
        self.lab = lab
        self.folder = folder
        script = folder / "job.sh"
        script.write_text(
            "#!/bin/bash\nexport SRES_CHECKPOINTLESS=1\n"
            f"srun --auto-resume=1 {srun} {line}\n"
            "echo srun ended with $? >> ended\n"
        )
        words = ["sbatch", "--parsable", f"--nodes={nodes}", "--exclusive", "--output=log"]
        words += ["--open-mode=append", *sbatch, str(script)]
        env = {"SRES_EVENTS": str(folder / "events")}
        env |= {} if config is None else {"SRES_CONFIG": str(config)}
        done = lab.run(words, cwd=folder, env=env, check=True)
        self.id = done.stdout.strip().split(";")[0]

    def lines(self, seat: int, incarnation: int = 0) -> list[dict[str, Any]]:
        path = self.folder / f"log.{seat}.{incarnation}"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]

    def world(self, seat: int, incarnation: int = 0) -> int:
        """Size of the world that this process last stepped in."""
        lines = self.lines(seat, incarnation)
        return int(lines[-1]["world"]) if lines else 0

    def event(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "events"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["event"] == name]

    def end(self) -> None:
        (self.folder / "end").touch()

    def ended(self) -> str:
        path = self.folder / "ended"
        return path.read_text() if path.exists() else ""

    def text(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __repr__(self) -> str:
        logs = {p.name: p.read_text().split("\n")[-2:] for p in sorted(self.folder.glob("log.*"))}
        return f"job {self.id}: {self.ended()}\n{self.text()}\n{logs}"


@pytest.fixture
def start(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> Callable[..., Run]:
    def begin(*sbatch: str, spec: LabSpec | None = None, **how: Any) -> Run:
        lab = fresh_lab(spec or LabSpec(nodes=6, network=True))
        run = Run(lab, tmp_path, *sbatch, **how)
        wait_for(lambda: run.event("living"), 60, run)
        return run

    return begin


def finish(run: Run, wait_for: WaitFor, code: int = 0) -> None:
    run.end()
    wait_for(lambda: f"srun ended with {code}" in run.ended(), 30, run)
    wait_for(lambda: all_idle(run.lab), 60, "every node is idle again")


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_has_more_to_do_after_its_training(
    start: Callable[..., Run], wait_for: WaitFor, tmp_path: Path, code: int
) -> None:
    """It saves the whole model, say, for longer than `resume.grace`: it is not ended for that."""
    (tmp_path / "sres.toml").write_text("[resume]\ngrace = 0.5\n")
    run = start(config=tmp_path / "sres.toml")
    (run.folder / "after").write_text(f"5 {code}")
    run.end()
    wait_for(lambda: f"srun ended with {code}" in run.ended(), 60, run)
    assert (run.folder / "after.done").exists()
    assert ("what came after it failed: exit code 3" in run.text()) == (code == 3)
    assert len({line["token"] for line in run.lines(0)}) == 1 and not run.lines(0, 1)


def test_a_node_loses_its_power(start: Callable[..., Run], wait_for: WaitFor) -> None:
    run = start(srun="--label")
    before = {seat: run.lines(seat)[-1] for seat in range(4)}
    victim = before[2]["node"]
    run.lab.power_off(victim)
    wait_for(lambda: run.world(0) == 3, 30, run)
    wait_for(lambda: run.world(2, 1) == 4, 30, run)
    joined = run.lines(2, 1)[0]
    assert joined["node"] not in {line["node"] for line in before.values()}
    assert (joined["rank"], joined["current"]) == ("2", True)
    assert {line["token"] for line in (joined, *before.values())} == {joined["token"]}
    assert joined["nodes"].split(",")[2] == joined["node"]
    # The others were never started again.
    assert not [seat for seat in (0, 1, 3) if run.lines(seat, 1)]
    wait_for(lambda: "healed: seats 2" in run.text(), 30, run)
    finish(run, wait_for)
    assert run.text().count("healed") == 1, run
    # A join step counts its tasks from 0: its lines have the number of the task that they replace.
    lines = [line for line in run.text().splitlines() if line.endswith("is here")]
    assert sorted(lines) == sorted(f"{seat}: seat {seat} is here" for seat in (0, 1, 2, 2, 3))


def test_a_node_that_takes_no_task_is_left_for_another(
    start: Callable[..., Run], wait_for: WaitFor
) -> None:
    """Nothing of what is checked is amiss: slurmd cannot start a step there."""
    run = start(spec=LabSpec(nodes=6, network=True, slurmdbd=True))
    words = 'mount --bind /bin/false "$(readlink -f /usr/sbin/slurmstepd)"'
    run.lab.run(["sh", "-c", words], node="n5", check=True)
    victim = run.lines(2)[-1]["node"]
    run.lab.power_off(victim)
    wait_for(lambda: "could start no task on it" in run.text(), 60, run)
    wait_for(lambda: run.world(2, 1) == 4, 60, run)
    assert run.lines(2, 1)[0]["node"] != "n5"
    wait_for(lambda: "healed: seats 2" in run.text(), 30, run)
    assert not [seat for seat in (0, 1, 3) if run.lines(seat, 1)], "the others stepped on"
    assert "left-out" in kinds(run.lab, "n5")
    finish(run, wait_for)


def test_a_node_that_is_away_for_a_moment_is_left_and_comes_back(
    start: Callable[..., Run], wait_for: WaitFor
) -> None:
    """The others do not wait for sresctld's verdict, which never comes: nothing happens to the node
    in Slurm, and its rank is healed where it was."""
    spec = LabSpec(nodes=4, network=True, sres_options={"detect": {"dead_after": 60.0}})
    run = start(spec=spec)
    victim = run.lines(2)[-1]["node"]
    run.lab.cut(victim)
    wait_for(lambda: run.world(0) == 3, 30, run)
    assert run.event("suspected")[0]["nodes"] == [victim], run
    run.lab.mend(victim)
    wait_for(lambda: run.world(0) == 4, 60, run)
    # The same process, unless it heard that it was given up.
    back = (run.lines(2, 1) or run.lines(2))[-1]
    assert (back["node"], back["rank"], back["current"]) == (victim, "2", True)
    finish(run, wait_for)
    shown = run.lab.run(["sinfo", "--noheader", "--Format=statelong,reason:40"], check=True).stdout
    assert "none" in shown and "fail" not in shown and "down" not in shown, shown
    assert not run.event("noticed"), run


def test_a_sick_node_is_left_while_it_still_works(
    start: Callable[..., Run], wait_for: WaitFor
) -> None:
    run = start()
    victim = run.lines(1)[-1]["node"]
    run.lab.kmsg(victim, XID)
    wait_for(lambda: run.world(1, 1) == 4, 30, run)
    assert run.lines(1, 1)[0]["node"] != victim
    assert run.lines(1)[-1]["at"] < run.lines(1, 1)[0]["at"]
    assert not [seat for seat in (0, 2, 3) if run.lines(seat, 1)]
    finish(run, wait_for)


def test_a_node_that_a_person_takes_out_of_the_job_stays_out(
    start: Callable[..., Run], wait_for: WaitFor
) -> None:
    run = start()
    run.lab.run(["scontrol", "update", f"jobid={run.id}", "numnodes=3"], check=True)
    wait_for(lambda: "a person took it out" in run.text(), 30, run)
    wait_for(lambda: run.world(0) == 3, 30, run)
    finish(run, wait_for)
    assert "healed" not in run.text() and not run.event("joining"), run


def test_rank_0_s_node_and_another_one_die_together(
    start: Callable[..., Run], wait_for: WaitFor
) -> None:
    """The batch host has no rank; it is the first node that is used instead."""
    # Should one be found dead before the other, the job's nodes change three times.
    spec = LabSpec(nodes=7, network=True, slurmdbd=True)
    run = start(spec=spec, nodes=5, srun="--nodes=4 --nodelist=n[2-5]")
    assert [run.lines(seat)[-1]["node"] for seat in range(4)] == ["n2", "n3", "n4", "n5"]
    run.lab.power_off("n[2,4]")
    wait_for(lambda: run.world(0, 1) == run.world(2, 1) == 4, 40, run)
    assert {run.lines(seat, 1)[0]["node"] for seat in (0, 2)} <= {"n1", "n2", "n4", "n6", "n7"}
    assert not [seat for seat in (1, 3) if run.lines(seat, 1)]
    finish(run, wait_for)


def test_a_task_that_dies_on_a_healthy_node_is_started_again_there(
    start: Callable[..., Run], wait_for: WaitFor
) -> None:
    # GPUs of all nodes together: the joining srun takes its own node's.
    spec = LabSpec(nodes=2, network=True, gres="gpu:2")
    run = start("--gpus=4", nodes=2, srun="--ntasks-per-node=2", spec=spec)
    (run.folder / "die.2").write_text("9")
    wait_for(lambda: run.world(2, 1) == 4, 30, run)
    assert run.lines(2, 1)[0]["node"] == run.lines(2)[-1]["node"]
    assert not run.lines(3, 1), "the one beside it lives"
    # And the new one too, in its own step.
    wait_for(lambda: run.event("joined"), 30, run)
    (run.folder / "die.2").write_text("9")
    wait_for(lambda: run.world(2, 2) == 4, 30, run)
    finish(run, wait_for)


def test_launchers_of_several_ranks_each(start: Callable[..., Run], wait_for: WaitFor) -> None:
    launcher = f"{sys.executable} -m slurm_resilience.launcher --no-python --nproc-per-node=2"
    run = start(
        nodes=3,
        spec=LabSpec(nodes=4, network=True),
        srun="--ntasks-per-node=1",
        launcher=f"{launcher} --standby=0",
    )
    assert run.event("living")[0]["seats"] == 6
    victim = run.lines(2)[-1]["node"]
    run.lab.power_off(victim)
    wait_for(lambda: run.world(2, 1) == run.world(3, 1) == 6, 60, run)
    assert run.lines(2, 1)[0]["node"] == run.lines(3, 1)[0]["node"] != victim
    wait_for(lambda: "healed: seats 2,3" in run.text(), 30, run)
    # One that is killed takes its ranks with it, and both come back.
    last = run.lines(4)[-1]
    run.lab.run(["kill", "-9", str(last["parent"])], node=last["node"], check=True)
    wait_for(lambda: run.world(4, 1) == run.world(5, 1) == 6, 60, run)
    assert not [seat for seat in (0, 1) if run.lines(seat, 1)]
    finish(run, wait_for)


def test_scancel_of_a_join_step_ends_all(start: Callable[..., Run], wait_for: WaitFor) -> None:
    run = start(nodes=2, spec=LabSpec(nodes=2, network=True), srun="--ntasks-per-node=2")
    (run.folder / "die.1").write_text("9")
    wait_for(lambda: run.event("joined"), 30, run)
    run.lab.run(["scancel", f"{run.id}.1"], check=True)
    wait_for(run.ended, 30, run)
    assert "ended with 0" not in run.ended()
    assert not run.lines(0, 1), "not started again"
    wait_for(lambda: all_idle(run.lab), 60, "every node is idle again")


def test_a_full_cluster_and_the_same_node_twice(
    start: Callable[..., Run], wait_for: WaitFor
) -> None:
    """The others step until the node is replaced; the new machine of its name is no suspect, and
    may die too."""
    run = start(spec=LabSpec(nodes=4, network=True, slurmdbd=True))
    victim = run.lines(2)[-1]["node"]
    for times in (1, 2):
        run.lab.power_off(victim)
        wait_for(lambda n=times: run.world(2, n) == 4, 60, run)
        assert run.lines(2, times)[0]["node"] == victim
        assert run.lines(2, times)[0]["current"]
        wait_for(lambda n=times: len(run.event("joined")) == n, 30, run)
    assert not [seat for seat in (0, 1, 3) if run.lines(seat, 1)]
    finish(run, wait_for)
