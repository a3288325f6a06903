"""A living step that grows by companions and shrinks when Slurm preempts them, on real Slurm."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle
from test_living_step import TASK, XID, Run

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 400.0
"""For each part of the long test: it takes so long on a machine that is very busy."""

PROGRAM = ROOT / "tests/training/programs/elastic.py"
SCAVENGE = "scavenge Nodes=ALL PriorityTier=1 GraceTime=20 PreemptMode=CANCEL MaxTime=INFINITE"
MAIN = "main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF"


def spec(nodes: int, gres: str | None = None) -> LabSpec:
    return LabSpec(
        nodes=nodes,
        gres=gres,
        network=True,
        options={
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "CANCEL",
            "PartitionName": MAIN,
        },
        partitions=(SCAVENGE,),
        sres_options={"elastic": {"partition": "scavenge", "snooze": 1.0}},
    )


def submit(run: Run, nodes: int, nodelist: str = "") -> str:
    """Submit a job of a higher priority; return its id."""
    words = ["sbatch", "--parsable", f"--nodes={nodes}", "--exclusive", "--output=/dev/null"]
    words += [f"--nodelist={nodelist}"] if nodelist else []
    done = run.lab.run([*words, "--wrap=sleep 300"], cwd=run.folder, check=True)
    return done.stdout.strip()


def state(lab: Lab, job: str) -> str:
    return lab.run(["squeue", "-h", "-a", "-j", job, "-o", "%T"]).stdout.strip()


def test_a_step_grows_by_a_free_node_and_gives_it_back(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(spec(3, gres="gpu:2"))
    # GPUs of the job's own nodes together.
    run = Run(lab, tmp_path, "--gpus=4", nodes=2, srun="--auto-resume-max-nodes=3")
    wait_for(lambda: run.world(0) == 3, 60, run)
    wait_for(lambda: run.event("grew"), 30, run)
    first = run.lines(2, 1)
    assert {line["rank"] for line in first} == {"2"} and all(line["current"] for line in first)
    other = submit(run, 1)
    wait_for(lambda: state(lab, other) == "RUNNING", 15, run)
    wait_for(lambda: run.world(0) == 2, 15, run)
    wait_for(lambda: run.event("shrank"), 15, run)
    # The job's own ranks were never started again, and no node was at fault.
    assert not [seat for seat in (0, 1) if run.lines(seat, 1)] and not run.event("noticed")
    run.end()
    wait_for(lambda: "srun ended with 0" in run.ended(), 30, run)
    lab.run(["scancel", other], check=True)
    wait_for(lambda: all_idle(lab), 30, "every node is idle again")


@pytest.mark.parametrize("mode", ["CANCEL", "REQUEUE"])
def test_nodes_that_slurm_takes_at_once_while_ranks_start_are_no_failure(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, mode: str
) -> None:
    """Without a GraceTime: the pause stays `elastic.snooze`, and does not double each time."""
    wanted = spec(2)
    partition = SCAVENGE.replace("GraceTime=20", "GraceTime=0").replace("CANCEL", mode)
    options = wanted.options | {"PreemptMode": mode}
    lab = fresh_lab(dataclasses.replace(wanted, options=options, partitions=(partition,)))
    slow = tmp_path / "slow.sh"
    # Ranks on companions take long to come.
    slow.write_text(
        '[ "$SRES_LENT" != 1 ] || { touch coming.$SLURM_JOB_ID.$SRES_COMPANION_JOB; sleep 600; }\n'
        'exec "$@"\n'
    )
    words = f"sh {slow} {sys.executable} {TASK} 0"
    run = Run(lab, tmp_path, nodes=1, srun="--auto-resume-max-nodes=2", line=words)
    for times in range(1, 4):
        coming = partial(lambda count: len([*tmp_path.glob("coming.*")]) == count, times)
        wait_for(coming, 60, run)
        other = submit(run, 1)
        wait_for(partial(lambda count: run.text().count("not grown") == count, times), 60, run)
        lab.run(["scancel", other], check=True)
    said = [line for line in run.text().splitlines() if "not grown" in line]
    assert all(line.endswith("asked again in 1 s") for line in said), said
    run.end()
    wait_for(lambda: "srun ended with 0" in run.ended(), 30, run)
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


def test_a_companion_that_a_person_requeues_comes_when_it_is_released(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(spec(3))
    run = Run(lab, tmp_path, nodes=2, srun="--auto-resume-max-nodes=3")
    wait_for(lambda: run.world(0) == 3, 60, run)
    words = ["squeue", "-h", "-p", "scavenge", "-o", "%A"]
    companion = lab.run(words, check=True).stdout.strip()
    # Slurm requeues no job that was submitted without.
    lab.run(["scontrol", "update", f"jobid={companion}", "requeue=1"], check=True)
    lab.run(["scontrol", "requeuehold", companion], check=True)
    wait_for(lambda: run.world(0) == 2, 30, run)
    wait_for(lambda: "keeps its place in the queue" in run.text(), 30, run)
    wait_for(lambda: state(lab, companion) == "PENDING", 60, run)
    lab.run(["scontrol", "release", companion], check=True)
    lab.run(["scontrol", "update", f"jobid={companion}", "starttime=now"], check=True)
    wait_for(lambda: run.world(0) == 3, 60, run)
    assert lab.run(words, check=True).stdout.strip() == companion, run
    run.end()
    wait_for(lambda: "srun ended with 0" in run.ended(), 30, run)
    wait_for(lambda: all_idle(lab), 30, "every node is idle again")


def test_a_sick_node_of_the_job_is_left_when_another_one_is_in(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(spec(5))
    run = Run(lab, tmp_path, nodes=2, srun="--auto-resume-max-nodes=3")
    wait_for(lambda: run.event("grew"), 60, run)
    victim = run.lines(1)[-1]["node"]
    lab.kmsg(victim, XID)
    # Seat 3 stands in; seat 1 is filled again; seat 3 goes.
    wait_for(lambda: run.world(1, 1) >= 3, 60, run)
    wait_for(lambda: run.event("shrank"), 30, run)
    wait_for(lambda: run.world(0) == 3, 15, run)
    since = run.lines(3, 1)[0]["at"]
    worlds = [line["world"] for line in run.lines(0) if line["at"] >= since]
    assert set(worlds) == {3, 4} and not run.lines(0, 1), worlds
    assert run.lines(1, 1)[0]["node"] != victim
    run.end()
    wait_for(lambda: "srun ended with 0" in run.ended(), 30, run)
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


def test_a_person_resizes_a_step_while_it_runs(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(spec(4))
    run = Run(lab, tmp_path, nodes=2, srun="--auto-resume-max-nodes=4")

    def resize(nodes: int) -> str:
        done = lab.run([str(own_bin() / "sres"), "job", "resize", run.id, str(nodes)])
        return done.stdout + done.stderr

    wait_for(lambda: run.world(0) == 4, 90, run)
    wait_for(lambda: len(run.event("grew")) == 2, 30, run)
    assert "to have 2 nodes, was 4" in resize(2)
    wait_for(lambda: run.world(0) == 2, 60, run)
    wait_for(lambda: len(run.event("shrank")) == 2, 30, run)
    assert "2 nodes is its target already" in resize(2)
    assert "at most 4, as its srun says" in resize(5)
    assert "keeps the 2 that it was started on" in resize(1)
    assert "to have 3 nodes, was 2" in resize(3)
    wait_for(lambda: run.world(0) == 3, 60, run)
    # The nodes came only by this order, and the job's own ranks were never started again.
    assert "resized to 2 nodes by root" in run.text()
    assert not [seat for seat in (0, 1) if run.lines(seat, 1)] and not run.event("noticed")
    words = [str(own_bin() / "sres"), "job", "show", run.id, f"--directory={tmp_path}"]
    shown = lab.run(words, check=True).stdout
    assert "3 nodes, asked for by root" in shown and "to 3 nodes by root" in shown, shown
    run.end()
    wait_for(lambda: "srun ended with 0" in run.ended(), 30, run)
    wait_for(lambda: all_idle(lab), 30, "every node is idle again")


class Training:
    """A real training, which makes its steps in worlds of given sizes."""

    def __init__(self, folder: Path, ranks: int, sizes: str, steps: int, *words: str) -> None:
        folder.mkdir()
        self.folder, self.logs, self.steps = folder, folder / "logs", steps
        self.logs.mkdir()
        self.line = [sys.executable, "-m", "slurm_resilience.launcher", "--standby=0"]
        self.line += [f"--nproc-per-node={ranks}", str(PROGRAM), f"--log={self.logs}"]
        self.line += [f"--steps={steps}", f"--sizes={sizes}", *words]

    def events(self, name: str) -> list[list[Any]]:
        """Return the details of all events of a kind, in order."""
        lines = [
            json.loads(line)
            for file in self.logs.glob("*.jsonl")
            for line in file.read_text().splitlines()
            if line.endswith("]")
        ]
        return [details for _, event, *details in sorted(lines) if event == name]

    def waits_for(self, size: int, step: int) -> bool:
        """Return whether a rank waits for a world of this size."""
        return any((at, wanted) == (step, size) for at, _, wanted in self.events("waits"))

    def worlds(self) -> list[int]:
        """Return the world in which each step was committed."""
        return [world for _, world in sorted({(e[0], e[2]) for e in self.events("step")})]

    def check_samples(self) -> None:
        """Check that each sample counts once, in the batches that each step's last world had."""
        committed = {step - 1: generation for step, generation, _ in self.events("step")}
        seen = [
            index
            for step, generation, indices in self.events("batch")
            if committed[step] == generation
            for index in indices
        ]
        assert sorted(seen) == list(range(self.steps * 32))

    def digest(self) -> str:
        """Return the checksums of all parts of the model, each the same on all its ranks."""
        found = {(part, digest) for part, digest in self.events("end")}
        assert len(found) == len({part for part, _ in found})
        return str(sorted(found))


@pytest.mark.timeout(6 * PATIENCE_SECONDS)
def changes_of_size(fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path) -> None:
    """2 → 4 → 3 (power loss) → 4 → 2 (preempted) → 4 nodes: no sample is lost or repeated, and the
    parameters have the bits of a run that kept its size."""
    sizes, steps = "2,4,3,4,2,4", 30
    fixed = Training(tmp_path / "fixed", 2, "", steps)
    elastic = Training(tmp_path / "elastic", 1, sizes, steps)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    clean |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    subprocess.run(fixed.line, env=clean, cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    lab = fresh_lab(spec(5))
    run = Run(
        lab,
        elastic.folder,
        nodes=2,
        srun="--auto-resume-max-nodes=4 env OMP_NUM_THREADS=1",
        line=" ".join(elastic.line),
    )
    wait_for(lambda: state(lab, run.id) == "RUNNING", 60, run)
    first, second = submit(run, 2), submit(run, 1)
    wait_for(lambda: elastic.waits_for(4, 5), PATIENCE_SECONDS, run)
    lab.run(["scancel", first], check=True)
    wait_for(lambda: elastic.waits_for(3, 10), PATIENCE_SECONDS, run)
    wait_for(lambda: len(run.event("grew")) == 2, PATIENCE_SECONDS, run)
    lab.power_off(run.event("grew")[-1]["nodes"][0])
    wait_for(lambda: elastic.waits_for(4, 15), PATIENCE_SECONDS, run)
    lab.run(["scancel", second], check=True)
    wait_for(lambda: elastic.waits_for(2, 20), PATIENCE_SECONDS, run)
    # The lost node may be back by now.
    words = ["squeue", "-h", "-p", "scavenge", "-t", "RUNNING", "-o", "%N"]
    lent = lab.run(words, check=True).stdout.split()
    third = submit(run, 2, ",".join(lent))
    wait_for(lambda: state(lab, third) == "RUNNING", 60, run)
    wait_for(lambda: elastic.waits_for(4, 25), PATIENCE_SECONDS, run)
    lab.run(["scancel", third], check=True)
    wait_for(lambda: "srun ended with 0" in run.ended(), PATIENCE_SECONDS, run)
    assert elastic.worlds() == [int(size) for size in sizes.split(",") for _ in range(5)]
    elastic.check_samples()
    assert elastic.digest() == fixed.digest()
    if curves := os.environ.get("SRES_TEST_CURVES"):
        words = [str(ROOT / "scripts/elastic_curves.py"), curves]
        words += [f"fixed size={fixed.logs}", f"2-4-3-4-2-4={elastic.logs}"]
        subprocess.run([sys.executable, *words], check=True, timeout=PATIENCE_SECONDS)


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
def resized_by_a_person(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """4 → 2 → 4 nodes by a person's word: the same samples, and the same bits, as at one size."""
    sizes, steps = "4,2,4", 15
    fixed = Training(tmp_path / "fixed", 2, "", steps)
    elastic = Training(tmp_path / "elastic", 1, sizes, steps)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    clean |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    subprocess.run(fixed.line, env=clean, cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    lab = fresh_lab(spec(4))
    run = Run(
        lab,
        elastic.folder,
        nodes=2,
        srun="--auto-resume-max-nodes=4 env OMP_NUM_THREADS=1",
        line=" ".join(elastic.line),
    )
    for size, step in ((2, 5), (4, 10)):
        wait_for(partial(elastic.waits_for, size, step), PATIENCE_SECONDS, run)
        lab.run([str(own_bin() / "sres"), "job", "resize", run.id, str(size)], check=True)
    wait_for(lambda: "srun ended with 0" in run.ended(), PATIENCE_SECONDS, run)
    assert elastic.worlds() == [int(size) for size in sizes.split(",") for _ in range(5)]
    elastic.check_samples()
    assert elastic.digest() == fixed.digest()


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
def suspended_while_its_companions_end(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """The job's own ranks are stopped, and given up as silent; the others train on, and die. The
    job's own have the last state in memory: they go on from it, without a checkpoint, and do again
    what the others did meanwhile, with the same bits."""
    steps, most = 60, 5
    fixed = Training(tmp_path / "fixed", 2, "", steps)
    elastic = Training(tmp_path / "elastic", 1, "", steps, "--pace=1")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    clean |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    subprocess.run(fixed.line, env=clean, cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    lab = fresh_lab(spec(most))
    run = Run(
        lab,
        elastic.folder,
        nodes=2,
        srun=f"--auto-resume-max-nodes={most} env OMP_NUM_THREADS=1",
        line=" ".join(elastic.line),
    )
    wait_for(lambda: most in elastic.worlds(), PATIENCE_SECONDS, run)
    lab.run(["scontrol", "suspend", run.id], check=True)
    wait_for(lambda: elastic.worlds()[-1] == 3, PATIENCE_SECONDS, run)
    words = ["squeue", "-h", "-p", "scavenge", "-o", "%A"]
    # The last of them stays until KillWait is over.
    lab.run(["scancel", *lab.run(words, check=True).stdout.split()], check=True)
    wait_for(lambda: not lab.run(words, check=True).stdout.split(), PATIENCE_SECONDS, run)
    lab.run(["scontrol", "resume", run.id], check=True)
    wait_for(lambda: "srun ended with 0" in run.ended(), PATIENCE_SECONDS, run)
    assert "from scratch" not in run.text()
    assert elastic.digest() == fixed.digest()


if "SRES_TEST_ELASTIC" in os.environ:  # minutes, on a busy machine
    test_suspended_while_its_companions_end = suspended_while_its_companions_end
    test_resized_by_a_person = resized_by_a_person
    test_changes_of_size = changes_of_size
