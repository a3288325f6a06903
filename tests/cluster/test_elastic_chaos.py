"""An elastic training on real Slurm that a seeded hand keeps harming, and governing, all along.

SRES_TEST_ELASTIC_DEEDS=40 does so many of its deeds (about 8 s each), SRES_TEST_SEED=7 others. No
sample may be lost or repeated, the parameters have the bits of a run that nothing disturbed, and
all nodes are idle in the end.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle
from test_elastic_job import Training, spec, state, submit
from test_living_step import XID, Run

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin
from slurm_resilience.slurm import hostlists

WaitFor = Callable[..., Any]
DEEDS = int(os.environ.get("SRES_TEST_ELASTIC_DEEDS", "0"))
SEED = int(os.environ.get("SRES_TEST_SEED", "1"))
NODES, CORE, MOST = 7, 2, 5
PACE_SECONDS = 0.25
STEPS_A_DEED = 24
TAIL_BYTES = 1 << 13
STAND_STILL_SECONDS = 150.0
"""For a step, whatever was done: a machine that is busy, and a core node that is replaced."""


class Hand:
    """Does one deed after the other. What it did stands in `story`."""

    def __init__(self, lab: Lab, run: Run, training: Training, seed: int) -> None:
        self.lab, self.run, self.training = lab, run, training
        self.chance = random.Random(seed)
        self.story: list[str] = []
        self._began = time.monotonic()
        self._others: list[str] = []
        self.deeds: list[Callable[[], None]] = [
            self.other_job,
            self.other_job,
            self.power_off,
            self.cut_for_a_while,
            self.sicken,
            self.kill_a_rank,
            self.cancel_a_companion,
            self.requeue_a_companion,
            self.suspend_a_companion,
            self.shorten_a_companion,
            self.suspend_the_job,
            self.resize,
            self.resize,
            self.kill_slurmctld,
            self.kill_sresctld,
            self.restart_a_slurmd,
            self.drain_for_a_while,
            self.close_the_partition_for_a_while,
        ]

    # -- what is seen ---------------------------------------------------------------------------

    def newest(self) -> tuple[int, int]:
        """Return the newest step that a rank has committed, and the size of its world."""
        found = [(0, 0)]
        for file in self.training.logs.glob("*.jsonl"):
            with file.open("rb") as log:
                log.seek(max(0, file.stat().st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
            found += [
                (int(step), int(world))
                for step, world in re.findall(r'"step", (\d+), \d+, (\d+)\]\n', text)
            ]
        return max(found)

    def core(self) -> list[str]:
        return self._nodes("-j", self.run.id)

    def lent(self) -> list[str]:
        return self._nodes("-p", "scavenge", "-t", "RUNNING")

    def companions(self) -> list[str]:
        return self.ask("squeue", "-h", "-p", "scavenge", "-o", "%A").split()

    def _nodes(self, *words: str) -> list[str]:
        said = self.ask("squeue", "-h", "-a", *words, "-o", "%N").split()
        return [node for names in said for node in hostlists.expand(names)]

    def is_over(self) -> bool:
        return "srun ended" in self.run.ended()

    # -- what is done ---------------------------------------------------------------------------

    def say(self, text: str) -> None:
        step, world = self.newest()
        self.story.append(
            f"{time.monotonic() - self._began:6.1f} s, step {step} of {world}: {text}"
        )

    def ask(self, *words: str) -> str:
        """Run a command of Slurm; slurmctld may be away, or refuse."""
        return self.lab.run(list(words), timeout=120).stdout.strip()

    def pass_steps(self, count: int, at_most: float = STAND_STILL_SECONDS) -> None:
        """Wait for so many steps of the training.

        Args:
            count: steps.
            at_most: seconds, where the training may stand still meanwhile.
        """
        wanted, deadline = self.newest()[0] + count, time.monotonic() + at_most
        while self.newest()[0] < wanted and not self.is_over():
            if time.monotonic() > deadline:
                assert at_most < STAND_STILL_SECONDS, f"no step for {at_most:.0f} s"
                return
            time.sleep(0.1)

    def deed(self) -> None:
        self.chance.choice(self.deeds)()

    def _any_node(self, *, batch_host: bool = False) -> str:
        """One of the training's, where others hold its state too.

        Args:
            batch_host: it may be that; Slurm ends a job that loses it.
        """
        core, lent = self.core(), self.lent()
        nodes = sorted({*(core if batch_host else core[1:]), *lent})
        return self.chance.choice(nodes) if nodes and self.newest()[1] > 1 else ""

    def other_job(self) -> None:
        if self._others and self.chance.random() < 0.6:
            job = self._others.pop(0)
            self.say(f"the other job {job} ends")
            self.ask("scancel", job)
            return
        job = submit(self.run, self.chance.randint(1, 3))
        self._others.append(job)
        self.say(f"another job, {job}, of a higher priority")

    def power_off(self) -> None:
        if node := self._any_node():
            self.say(f"{node} loses its power")
            self.lab.power_off(node)
            self.pass_steps(3 * STEPS_A_DEED)

    def cut_for_a_while(self) -> None:
        if node := self._any_node():
            steps = self.chance.choice([1, 6, 30])
            self.say(f"the cable of {node} is pulled for {steps} steps")
            self.lab.cut(node)
            self.pass_steps(steps, 30)
            self.lab.mend(node)
            self.say(f"{node} has its cable again")
            self.pass_steps(STEPS_A_DEED)

    def sicken(self) -> None:
        if node := self._any_node():
            self.say(f"{node} is sick")
            self.lab.kmsg(node, XID)
            self.pass_steps(2 * STEPS_A_DEED)

    def kill_a_rank(self) -> None:
        node = self._any_node(batch_host=True)
        words = ["pkill", "-9", "--newest", "-f", "programs/elastic.py"]
        if node:
            self.say(f"SIGKILL to what is newest on {node}")
            self.lab.run(words, node=node)

    def cancel_a_companion(self) -> None:
        if jobs := self.companions():
            job = self.chance.choice(jobs)
            self.say(f"scancel of companion {job}")
            self.ask("scancel", job)

    def requeue_a_companion(self) -> None:
        if jobs := self.companions():
            job = self.chance.choice(jobs)
            self.say(f"companion {job} is requeued, and released")
            self.ask("scontrol", "update", f"jobid={job}", "requeue=1")
            self.ask("scontrol", "requeuehold", job)
            self.pass_steps(STEPS_A_DEED)
            self.ask("scontrol", "release", job)
            self.ask("scontrol", "update", f"jobid={job}", "starttime=now")

    def suspend_a_companion(self) -> None:
        if jobs := self.companions():
            job, steps = self.chance.choice(jobs), self.chance.choice([2, 40])
            self.say(f"companion {job} is suspended for {steps} steps")
            self.ask("scontrol", "suspend", job)
            self.pass_steps(steps, 60)
            self.ask("scontrol", "resume", job)

    def suspend_the_job(self) -> None:
        """Its own ranks and its supervisor stand still; those of its companions go on."""
        seconds = self.chance.choice([0.5, 8.0, 30.0])
        self.say(f"the job is suspended for {seconds:g} s")
        self.ask("scontrol", "suspend", self.run.id)
        self.pass_steps(20 * STEPS_A_DEED, seconds)
        self.ask("scontrol", "resume", self.run.id)
        self.say("the job runs again")
        self.pass_steps(STEPS_A_DEED)

    def shorten_a_companion(self) -> None:
        if jobs := self.companions():
            job = self.chance.choice(jobs)
            self.say(f"companion {job} has a minute left")
            self.ask("scontrol", "update", f"jobid={job}", "timelimit=1")

    def resize(self) -> None:
        nodes = self.chance.randint(CORE, MOST)
        self.say(f"sres job resize to {nodes}")
        self.ask(str(own_bin() / "sres"), "job", "resize", self.run.id, str(nodes))

    def kill_slurmctld(self) -> None:
        self.say("slurmctld is killed, and started again")
        self.lab.kill_daemon("slurmctld", signal.SIGKILL)
        self.pass_steps(self.chance.choice([1, 40]), 30)
        self.lab.start_daemon("slurmctld")

    def kill_sresctld(self) -> None:
        self.say("sresctld is killed, and started again")
        self.lab.kill_daemon("sresctld", signal.SIGKILL)
        self.pass_steps(self.chance.choice([1, 40]), 30)
        self.lab.start_daemon("sresctld")

    def restart_a_slurmd(self) -> None:
        if node := self._any_node(batch_host=True):
            self.say(f"slurmd of {node} is restarted")
            self.lab.kill_daemon("slurmd", signal.SIGTERM, node)
            self.pass_steps(self.chance.choice([1, 10]), 5)
            self.lab.start_daemon("slurmd", node)

    def drain_for_a_while(self) -> None:
        if node := self._any_node(batch_host=True):
            self.say(f"a person drains {node} for a while")
            self.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=by hand")
            self.pass_steps(2 * STEPS_A_DEED)
            self.ask("scontrol", "update", f"nodename={node}", "state=resume")

    def close_the_partition_for_a_while(self) -> None:
        self.say("a person closes the partition of the companions for a while")
        self.ask("scontrol", "update", "partition=scavenge", "state=down")
        self.pass_steps(STEPS_A_DEED)
        self.ask("scontrol", "update", "partition=scavenge", "state=up")

    def be_done(self) -> None:
        """Take away what it has left that keeps nodes."""
        for job in self._others:
            self.ask("scancel", job)


@pytest.mark.timeout(600 + 60 * DEEDS)
def whatever_is_done_no_sample_is_lost(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    steps = DEEDS * 2 * STEPS_A_DEED
    fixed = Training(tmp_path / "fixed", 2, "", steps)
    elastic = Training(tmp_path / "elastic", 1, "", steps, f"--pace={PACE_SECONDS}")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    clean |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    subprocess.run(fixed.line, env=clean, cwd=tmp_path, check=True, timeout=600)
    # Without slurmdbd, 22.05 changes the nodes of a job twice at most.
    lab = fresh_lab(dataclasses.replace(spec(NODES), slurmdbd=True))
    # 26.05 does not start again after a SIGKILL until it has saved the accounts' usage once ("No
    # Assoc usage file to recover"): it does as it ends, and each five minutes.
    lab.kill_daemon("slurmctld")
    lab.start_daemon("slurmctld")
    wait_for(lambda: all_idle(lab), 60, "every node is idle")
    run = Run(
        lab,
        elastic.folder,
        nodes=CORE,
        srun=f"--auto-resume-max-nodes={MOST} env OMP_NUM_THREADS=1",
        line=" ".join(elastic.line),
    )
    wait_for(lambda: state(lab, run.id) == "RUNNING", 60, run)
    hand = Hand(lab, run, elastic, SEED)
    try:
        hand.pass_steps(20)
        while not hand.is_over():
            if hand.newest()[0] < steps - 4 * STEPS_A_DEED:
                hand.deed()
            hand.pass_steps(hand.chance.randint(1, STEPS_A_DEED))
        hand.be_done()
        assert "srun ended with 0" in run.ended()
        elastic.check_samples()
        assert elastic.digest() == fixed.digest()
        wait_for(lambda: all_idle(lab), 120, "every node is idle again")
    finally:
        print("\n".join([f"seed {SEED}", *hand.story]))
        print(run)


if DEEDS:  # minutes
    test_whatever_is_done_no_sample_is_lost = whatever_is_done_no_sample_is_lost
