"""`scripts/demo --checkpointless`: a node dies, and no other rank stops."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from slurm_resilience.demo import accounting
from slurm_resilience.demo.narration import RANKS, TEMPLATES, Demo, interruptible, read_lines
from slurm_resilience.demo.phase_table import phase_table
from slurm_resilience.errors import SresError
from slurm_resilience.lab import Lab, LabSpec

NODES = 6
GLOBAL_BATCH = 128
AFTER_FAULT, AFTER_IDLE = 2.0, 5.0
"""Targets, seconds: from the fault until the survivors' first step, and from there being an idle
node until the new rank's."""
LOSS_TOLERANCE = 1e-3
"""Relative: sums over three ranks and over four are rounded differently."""
LABELS = {
    "detected": "fault → detected",
    "marked": "… → node marked",
    "survivors_step": "… → survivors' first step",
    "node_idle": "… → idle node in the job",
    "step_started": "… → join step started",
    "joined": "… → first step of all ranks",
    "node_back": "fault → node replaced and idle",
}
AWAITED = tuple(name for name in accounting.NAMES if name != "node_back")


class CheckpointlessDemo(Demo):
    """One run."""

    def start(self, name: str, flags: str, pace: float, rank0: bool) -> None:
        """Start a training in a job of its own.

        By sbatch; by salloc where even the first node may die, which would be the batch host.
        """
        folder = self.work / name
        folder.mkdir()
        program = [sys.executable, "-m", "slurm_resilience.launcher", "--nproc-per-node=1"]
        # An undisturbed rank needs no standby that loads torch beside it.
        program += [] if flags else ["--standby=0"]
        program += [str(TEMPLATES / "train_checkpointless.py"), f"--steps={self.steps}"]
        program += [f"--pace={pace}", f"--global-batch={GLOBAL_BATCH}", f"--log={folder}/steps"]
        step = shlex.join(["srun", *flags.split(), *program])
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{step} >>log 2>&1\necho $? >code\n")
        script.chmod(0o755)
        words = [f"--nodes={RANKS}", "--ntasks-per-node=1", "--exclusive", f"--job-name={name}"]
        env = {
            "SRES_EVENTS": str(folder / "events.jsonl"),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if not rank0:
            submit = ["sbatch", *words, "--output=/dev/null", str(script)]
            self.lab.run(submit, cwd=folder, env=env, check=True)
            return
        quiet = subprocess.DEVNULL
        words = ["salloc", *words, str(script)]
        self.lab.popen(words, cwd=folder, env=env, stdout=quiet, stderr=quiet)

    def code(self, name: str) -> int | None:
        """Return srun's exit code; None: it runs."""
        try:
            return int((self.work / name / "code").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def power_off(self, node: str) -> float:
        """Cut a node's power; return the time, seconds since the epoch."""
        at = time.time()
        self.lab.power_off(node)
        return at

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return what the ranks of a training have told."""
        folder = self.work / name / "steps"
        return [line for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path)]

    def newest(self, name: str) -> int:
        return max((x["step"] for x in self.lines(name) if x["what"] == "done"), default=0)

    def seats_of(self, node: str) -> list[int]:
        """Return the seats on a node: one a node, in the order of the nodes."""
        (living,) = (e for e in self.supervisor() if e["event"] == "living")
        return [living["nodes"].index(node)]

    def supervisor(self) -> list[dict[str, Any]]:
        return read_lines(self.work / "main" / "events.jsonl")

    def phases(self, at: float, node: str, seats: list[int]) -> dict[str, float | None]:
        return accounting.phases(
            at, node, seats, self.journal(), self.supervisor(), self.lines("main")
        )


def run(
    victim: str, steps: int, pace: float, slurm_root: Path | None, console: Console
) -> dict[str, Any]:
    """Run the whole demo; return what `--json` writes.

    Args:
        victim: ``rank0``, or any other rank's node.
        steps: optimizer steps.
        pace: least seconds of each.
        slurm_root: another Slurm's root directory; None: the machine's own Slurm.
    """
    console.print("[bold]slurm-resilience[/bold]: power loss, [bold]checkpointless[/bold]")
    with (
        interruptible(),
        Lab.up(
            LabSpec(nodes=NODES, network=True, slurm_root=slurm_root), name=f"demo-{os.getpid()}"
        ) as lab,
    ):
        demo = CheckpointlessDemo(lab, "power", steps, pace, console)
        demo.say(f"lab '{lab.name}': {NODES} nodes idle, real Slurm, each node its own network")
        return _carry_out(demo, victim == "rank0")


def _carry_out(demo: CheckpointlessDemo, rank0: bool) -> dict[str, Any]:
    demo.start("main", "--auto-resume=1", demo.pace, rank0)
    demo.say(f"{RANKS} ranks on {RANKS} nodes; no checkpoint is ever written")
    demo.wait("training", 120, lambda: any(e["event"] == "living" for e in demo.supervisor()))
    demo.say("training runs, and the supervisor watches its ranks")
    nodes = next(e for e in demo.supervisor() if e["event"] == "living")["nodes"]
    node = nodes[0 if rank0 else 2]
    seats = demo.seats_of(node)
    middle = demo.steps // 4
    demo.wait(f"step {middle}", 120, lambda: demo.newest("main") >= middle)
    at = demo.power_off(node)
    demo.say(
        f"at step {demo.newest('main')}: {node} (rank {seats[0]}) loses its power: cable first, "
        "no goodbye",
        "FAULT",
    )

    def complete() -> bool:
        seen = demo.phases(at, node, seats)
        return all(seen[name] is not None for name in AWAITED)

    demo.wait("all ranks step again", 120, complete)
    demo.say("all ranks step again; no other rank was stopped, and no step was done twice")
    demo.wait("the end of the training", 180, lambda: demo.code("main") is not None)
    demo.narrate()
    demo.wait("the node", 60, lambda: demo.phases(at, node, seats)["node_back"] is not None)
    demo.say("training is done; now the same from the same seed, undisturbed")
    demo.start("undisturbed", "", 0.0, False)
    demo.wait("the undisturbed run", 240, lambda: demo.code("undisturbed") is not None)
    return _result(demo, demo.phases(at, node, seats), node)


def _result(demo: CheckpointlessDemo, phases: dict[str, float | None], node: str) -> dict[str, Any]:
    books = accounting.verdict(demo.lines("main"), demo.steps, GLOBAL_BATCH)
    other = accounting.verdict(demo.lines("undisturbed"), demo.steps, GLOBAL_BATCH)
    apart = abs(books.loss - other.loss) / other.loss if other.loss else math.inf
    problems = list(books.problems)
    if other.problems:
        problems.append(f"the undisturbed run: {other.problems[0]}")
    if not apart < LOSS_TOLERANCE:
        problems.append(f"the last loss is {books.loss:.6f}, undisturbed {other.loss:.6f}")
    problems += [
        f"the {name} run ended with {code}"
        for name in ("main", "undisturbed")
        if (code := demo.code(name)) != 0
    ]
    _print(demo, phases, books, other, problems)
    return {
        "fault": "power",
        "checkpointless": True,
        "victim": node,
        "phases": phases,
        "steps": books.steps,
        "loss": books.loss,
        "loss_undisturbed": other.loss,
        "problems": problems,
    }


def _print(
    demo: CheckpointlessDemo,
    phases: dict[str, float | None],
    books: accounting.DemoOutcome,
    other: accounting.DemoOutcome,
    problems: list[str],
) -> None:
    targets = {"survivors_step": AFTER_FAULT}
    if phases["node_idle"] is not None:
        targets["joined"] = phases["node_idle"] + AFTER_IDLE
    title = "A node dies, the others go on"
    demo.console.print(phase_table(title, LABELS, phases, targets))
    demo.console.print(
        f"{books.steps} steps, none done twice; last loss {books.loss:.6f}, undisturbed "
        f"{other.loss:.6f}"
    )
    if problems:
        for text in problems:
            demo.console.print(f"[bold red]WRONG[/bold red] {text}")
    else:
        demo.console.print(
            "[bold green]Each sample once, all replicas bit-equal[/bold green], no checkpoint used"
        )


def check(result: dict[str, Any]) -> None:
    """Raise SresError unless all is right."""
    if result["problems"]:
        raise SresError("; ".join(result["problems"][:3]))
